"""Adaptive time limits for rewards on verl: ``+rl_accel.reward_timeout.enable=True``.

:func:`wire` sets two parts in verl's configuration. In a reward worker, the module ``manager`` holds the configured reward manager,
and runs the reward function, the user's or verl's own (``code_rewards``), within time limits. In an agent-loop worker, the mixin
:data:`WORKER_PART` marks validation responses and tolerates dead reward workers. The counts of all reward workers reach the
trainer's log through the anchor store, which shares the durations of correct executions between processes.
"""

import functools
import os
from collections.abc import Mapping
from typing import Any

from rl_accel.errors import ConfigError, refuse
from rl_accel.features import RewardTimeoutFlags
from rl_accel.integrations.verl import agent_loop
from rl_accel.patches.seams import step_observer
from rl_accel.patches.verl import config_intake
from rl_accel.patches.verl.verl_run import VerlRun
from rl_accel.telemetry.metrics import Observer

MANAGER = "RewardTimeoutManager"
MANAGER_MODULE = "pkg://rl_accel.integrations.verl.reward_timeout.manager"
"""Values with which verl loads rl-accel's reward manager: ``MANAGER`` for the configuration key ``reward.reward_manager.name``,
``MANAGER_MODULE`` for ``reward.reward_manager.module.path``."""

SECTION = "reward_timeout"
"""Name of the section of ``reward`` in verl's configuration that holds the reward manager that the user configured, and the path of
the file with anchors (longest correct executions)."""

WORKER_PART = "rl_accel.integrations.verl.reward_worker_proxy.ValidationTag"
"""Full name of this feature's mixin for verl's agent-loop workers."""

_FLAG = "rl_accel.reward_timeout"
_refuse = functools.partial(refuse, _FLAG)
_REWARD = "reward.reward_manager"


def wire(run: VerlRun, flags: RewardTimeoutFlags) -> None:
    """Sets rl-accel's reward manager and agent-loop manager in the configuration of ``run``. Idempotent.

    Raises:
        ConfigError: a setting conflicts with reward time limits, or verl is too old.
    """
    _check(run)
    if flags.grader:
        raise ConfigError(f"{_FLAG}.grader is a flag for slime; on verl, set reward.custom_reward_function.path")
    manager = run.config.reward.reward_manager
    held = {"source": manager.source, "name": manager.name, "path": manager.module.path}
    held = run.get(f"reward.{SECTION}.manager", held)
    folder = run.get("trainer.default_local_dir")
    # An absolute path: Ray processes with another working directory would resolve a relative path differently.
    anchors = os.path.join(os.path.abspath(folder), "rl_accel_reward_anchors.json") if folder else None
    section = {"manager": held, "anchors": run.get(f"reward.{SECTION}.anchors", anchors)}
    for key, value in {"source": "importlib", "name": MANAGER, "module.path": MANAGER_MODULE}.items():
        run.set(f"{_REWARD}.{key}", value)
    run.set(f"reward.{SECTION}", section)
    agent_loop.choose(run, WORKER_PART)


def _check(run: VerlRun) -> None:
    if run.get(_REWARD) is None:
        import verl

        raise ConfigError(
            f"{_FLAG} wants verl 0.8.0 or later with its reward loop ({_REWARD}), found verl {verl.__version__}"
        )
    if run.get("reward.reward_model.enable"):
        if not (custom := run.get("reward.custom_reward_function.path")):
            reason = "the reward model alone gives the score"
            _refuse("reward.custom_reward_function.path", "a function", custom, reason)
        if not run.get("reward.reward_model.enable_resource_pool"):
            reason = "on the trainer's own devices scores are taken in one go, and validation is not told from training"
            _refuse("reward.reward_model.enable_resource_pool", True, False, reason)
    agent_loop.check(run, _FLAG, "agent loops must tell validation from training")
    name = run.get(f"{_REWARD}.name")
    if run.get(f"{_REWARD}.source") == "register":
        from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER

        if name not in REWARD_MANAGER:
            _refuse(f"{_REWARD}.name", f"one of {', '.join(REWARD_MANAGER)}", name)


def _observer(_flags: RewardTimeoutFlags) -> Observer:
    from rl_accel.integrations.ray import reward_anchors

    collect = reward_anchors.Collector()

    def observe(step: int, logged: Mapping[str, Any]) -> dict[str, float]:
        manager = getattr(config_intake.trainer(), "reward_loop_manager", None)
        if workers := getattr(manager, "reward_loop_worker_handles", None):
            reward_anchors.flush(workers)
        return collect(step, logged)

    return observe


SWITCHES = (step_observer("reward_timeout", _observer, f"verl.experimental.reward_loop:{MANAGER}"),)
