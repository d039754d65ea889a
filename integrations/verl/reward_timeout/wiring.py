"""Puts the reward manager and the agent loops of this feature into verl's configuration, or says why they cannot work.

In the trainer process it also registers the manager, and brings what reward workers have counted to the trainer's logger.
"""

import functools
import logging
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf, open_dict

from rl_accel.errors import ConfigError, refuse
from rl_accel.features import RewardTimeoutFlags
from rl_accel.integrations.verl import agent_loop
from rl_accel.integrations.verl.reward_timeout import MANAGER, MANAGER_MODULE, SECTION, WORKER_PART
from rl_accel.patches.seams import Registration, Seams
from rl_accel.telemetry import metrics

logger = logging.getLogger("rl_accel")

SEAMS: Seams = {
    "verl.experimental.agent_loop.agent_loop:AgentLoopWorker._compute_score": ("self", "outputs", "kwargs"),
    "verl.experimental.agent_loop.agent_loop:AgentLoopWorker._agent_loop_postprocess": ("self", "output", "validate"),
    "verl.experimental.reward_loop.reward_manager.registry:REWARD_MANAGER": None,
}
"""Agent loops must tell validation from training; verl 0.9.1 has them."""
_FLAG = "rl_accel.reward_timeout"
_refuse = functools.partial(refuse, _FLAG)
_REWARD = "reward.reward_manager"
_ANCHORS = "rl_accel_reward_anchors.json"
_REGISTERED = "rl_accel_reward_timeout"
_REPLY_SECONDS = 5.0
COUNTS = (
    "executions",
    "correct",
    "timeouts",
    "timeouts_full",
    "killed",
    "cancelled",
    "probes",
    "errors",
    "seconds",
    "waited_seconds",
    "saved_seconds",
    "eval_executions",
    "eval_errors",
    "workers_replaced",
    "reward_workers_lost",
    "store_unreachable",
)


def wire(config: Any, flags: RewardTimeoutFlags) -> None:
    """Choose our reward manager and agent loops in ``config`` (verl's, changed in place). Idempotent.

    Raises:
        ConfigError: something in ``config`` cannot go together with this feature, or a flag does not fit.
    """
    check(config)
    manager = config.reward.reward_manager
    if is_wired(config):
        held = config.reward[SECTION].manager
    else:
        held = {"source": manager.source, "name": manager.name, "path": manager.module.path}
    folder = OmegaConf.select(config, "trainer.default_local_dir", default=None)
    # Ray processes of other jobs' folders would read a relative path differently.
    anchors = str(Path(os.path.abspath(folder)) / _ANCHORS) if folder else None
    section = {"flags": asdict(flags), "manager": held, "anchors": anchors}
    with open_dict(config):
        manager.source, manager.name, manager.module.path = "importlib", MANAGER, MANAGER_MODULE
        OmegaConf.update(config, f"reward.{SECTION}", section, merge=False)
    agent_loop.choose(config, WORKER_PART)


def is_wired(config: Any) -> bool:
    """Whether ``config`` has been through :func:`wire`."""
    return OmegaConf.select(config, f"reward.{SECTION}", default=None) is not None


def refuse_unwired(config: Any) -> None:
    """Stop a trainer whose configuration nobody has wired.

    Raises:
        ConfigError: its driver has not called ``validate_config``.
    """
    found = OmegaConf.select(config, f"{_REWARD}.name", default=None)
    if found != MANAGER or not is_wired(config):
        raise ConfigError(
            f"{_FLAG} wants {_REWARD}.name = {MANAGER} in the trainer, found {found}; "
            "verl's validate_config sets it, which the driver must call before it starts the trainer"
        )


def check(config: Any) -> None:
    """Refuse what this feature cannot work with.

    Raises:
        ConfigError: names the key, what is wanted and what was found.
    """

    def get(key: str, default: Any = None) -> Any:
        return OmegaConf.select(config, key, default=default)

    if get(_REWARD) is None:
        import verl

        raise ConfigError(
            f"{_FLAG} wants verl 0.9.1 or later with its reward loop ({_REWARD}), found verl {verl.__version__}"
        )
    custom = get("reward.custom_reward_function.path")
    if get("reward.reward_model.enable", False):
        if not custom:
            _refuse(
                "reward.custom_reward_function.path", "a function", custom, "the reward model alone gives the score"
            )
        if not get("reward.reward_model.enable_resource_pool", False):
            _refuse(
                "reward.reward_model.enable_resource_pool",
                True,
                False,
                "on the trainer's own devices scores are taken in one go, and validation is not told from training",
            )
    agent_loop.check(config, _FLAG, "agent loops must tell validation from training")
    source, name = get(f"{_REWARD}.source"), get(f"{_REWARD}.name")
    if source == "register":
        from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER

        theirs = [known for known, manager in REWARD_MANAGER.items() if not manager.__module__.startswith("rl_accel.")]
        if name not in theirs:
            _refuse(f"{_REWARD}.name", f"one of {', '.join(theirs)}", name)


class Collector:
    """Asks the job's store of anchors, in the trainer process. An answer that does not come costs the numbers of one step."""

    def __init__(self) -> None:
        self._incarnation = ""

    def __call__(self) -> dict[str, float]:
        """Return the numbers since the last call by name, ``reward_timeout/executions``; {} before there are any.

        Besides the counts of :class:`~rl_accel.reward.limited_executor.LimitedExecutor`: ``errors``, functions that gave no score;
        ``anchors``, how many are known; ``workers_replaced``, processes of graders that died; ``reward_workers_lost``, reward
        workers that died and were replaced; ``store_restarts``, 1 if the store is another than at the last call;
        ``store_unreachable``, how often it did not answer.
        """
        import ray
        from ray.exceptions import RayError

        from rl_accel.integrations.ray.reward_anchors import NAME

        if not ray.is_initialized():
            return {}
        try:
            store = ray.get_actor(NAME)
            replies = [store.take_counts.remote(), store.incarnation.remote()]
            counts, incarnation = ray.get(replies, timeout=_REPLY_SECONDS)
        except (RayError, ValueError) as error:  # ValueError: there is no actor of that name
            if not self._incarnation:
                return {}
            logger.warning("rl-accel: no numbers of this step's rewards: %s", str(error).splitlines()[:1])
            return {"reward_timeout/store_unreachable": 1.0}
        restarts = float(bool(self._incarnation) and incarnation != self._incarnation)
        self._incarnation = incarnation
        named = {**dict.fromkeys(COUNTS, 0.0), **counts, "store_restarts": restarts}
        return {f"reward_timeout/{name}": value for name, value in named.items()}


def _registered() -> Any:
    # Not imported here: the state is asked for by any thread, and another one may be about to import this very module.
    registry = sys.modules.get("verl.experimental.reward_loop.reward_manager.registry")
    return getattr(registry, "REWARD_MANAGER", {}).get(_REGISTERED)


def _register(_settings: Any) -> None:
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER

    from rl_accel.integrations.verl.reward_timeout.manager import RewardTimeoutManager

    REWARD_MANAGER[_REGISTERED] = RewardTimeoutManager
    metrics.collect("reward_timeout", Collector())


def _unregister() -> None:
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER

    metrics.collect("reward_timeout", None)
    REWARD_MANAGER.pop(_REGISTERED, None)


SWITCHES = (
    Registration(
        name="verl.reward_manager.reward_timeout",
        feature="reward_timeout",
        target=f"verl.experimental.reward_loop:{MANAGER}",
        register=_register,
        unregister=_unregister,
        owner="rl_accel.integrations.verl.reward_timeout.manager",
        find=_registered,
    ),
)
