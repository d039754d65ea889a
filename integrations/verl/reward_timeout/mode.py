"""Makes the feature visible where verl keeps reward managers, and collects its numbers in the trainer process."""

import sys
from typing import Any

from rl_accel.integrations.verl.reward_timeout import MANAGER
from rl_accel.patches.registration import Registration
from rl_accel.telemetry import metrics

_NAME = "rl_accel_reward_timeout"


def _registry() -> dict[str, type]:
    from verl.experimental.reward_loop.reward_manager import registry

    found: dict[str, type] = registry.REWARD_MANAGER
    return found


def _find() -> Any:
    # Not imported here: the state is asked for by any thread, and another one may be about to import this very module.
    registry = sys.modules.get("verl.experimental.reward_loop.reward_manager.registry")
    return getattr(registry, "REWARD_MANAGER", {}).get(_NAME)


def _register(_settings: Any) -> None:
    from rl_accel.integrations.verl.reward_timeout.manager import RewardTimeoutManager
    from rl_accel.integrations.verl.reward_timeout.numbers import Collector

    _registry()[_NAME] = RewardTimeoutManager
    metrics.collect("reward_timeout", Collector())


def _unregister() -> None:
    metrics.collect("reward_timeout", None)
    _registry().pop(_NAME, None)


SWITCHES = (
    Registration(
        name="verl.reward_manager.reward_timeout",
        feature="reward_timeout",
        target=f"verl.experimental.reward_loop:{MANAGER}",
        register=_register,
        unregister=_unregister,
        owner="rl_accel.integrations.verl.reward_timeout.manager",
        find=_find,
    ),
)
