"""Adaptive time limits for rewards on verl: ``+rl_accel.reward_timeout.enable=True``.

Only official seams: a reward manager and a part of agent-loop workers, both chosen by :func:`wire` in the configuration. In a
reward worker ``manager`` holds the reward manager that was configured and gives it a function of ours to score with, which runs
the user's function, or verl's own (``code_rewards``), within limits. In an agent-loop worker :data:`WORKER_PART` tells validation
from training, and goes on without a reward worker that dies. What is counted reaches the trainer's log by the store of anchors.
"""

import functools
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf, open_dict

from rl_accel.errors import ConfigError, refuse
from rl_accel.features import RewardTimeoutFlags
from rl_accel.integrations.verl import agent_loop
from rl_accel.patches.seams import Registration, Seams
from rl_accel.telemetry import metrics

SEAMS: Seams = {
    "verl.experimental.agent_loop.agent_loop:AgentLoopWorker._compute_score": ("self", "outputs", "kwargs"),
    "verl.experimental.agent_loop.agent_loop:AgentLoopWorker._agent_loop_postprocess": ("self", "output", "validate"),
    "verl.experimental.reward_loop.reward_manager.registry:REWARD_MANAGER": None,
}
"""Agent loops must tell validation from training; verl 0.9.1 has them."""

MANAGER = "RewardTimeoutManager"
MANAGER_MODULE = "pkg://rl_accel.integrations.verl.reward_timeout.manager"
"""The values of ``reward.reward_manager.name`` and ``.module.path``."""

SECTION = "reward_timeout"
"""What every process finds under ``reward`` in verl's configuration: the flags, the manager that is held, where anchors go."""

WORKER_PART = "rl_accel.integrations.verl.reward_worker_proxy.Marking"
"""What this feature adds to agent-loop workers."""

_FLAG = "rl_accel.reward_timeout"
_refuse = functools.partial(refuse, _FLAG)
_REWARD = "reward.reward_manager"


def wire(config: Any, flags: RewardTimeoutFlags) -> None:
    """Choose our reward manager and agent loops in ``config`` (verl's, changed in place). Idempotent.

    Raises:
        ConfigError: something in ``config`` cannot go together with this feature, or a flag does not fit.
    """
    _check(config)
    manager = config.reward.reward_manager
    if _is_wired(config):
        held = config.reward[SECTION].manager
    else:
        held = {"source": manager.source, "name": manager.name, "path": manager.module.path}
    folder = OmegaConf.select(config, "trainer.default_local_dir", default=None)
    # Ray processes of other jobs' folders would read a relative path differently.
    anchors = str(Path(os.path.abspath(folder), "rl_accel_reward_anchors.json")) if folder else None
    section = {"flags": asdict(flags), "manager": held, "anchors": anchors}
    with open_dict(config):
        manager.source, manager.name, manager.module.path = "importlib", MANAGER, MANAGER_MODULE
        OmegaConf.update(config, f"reward.{SECTION}", section, merge=False)
    agent_loop.choose(config, WORKER_PART)


def refuse_unwired(config: Any) -> None:
    """Stop a trainer whose configuration nobody has wired.

    Raises:
        ConfigError: its driver has not called ``validate_config``.
    """
    found = OmegaConf.select(config, f"{_REWARD}.name", default=None)
    if found != MANAGER or not _is_wired(config):
        raise ConfigError(
            f"{_FLAG} wants {_REWARD}.name = {MANAGER} in the trainer, found {found}; "
            "verl's validate_config sets it, which the driver must call before it starts the trainer"
        )


def _is_wired(config: Any) -> bool:
    return OmegaConf.select(config, f"reward.{SECTION}", default=None) is not None


def _check(config: Any) -> None:
    """Refuse what this feature cannot work with."""

    def get(key: str, default: Any = None) -> Any:
        return OmegaConf.select(config, key, default=default)

    if get(_REWARD) is None:
        import verl

        raise ConfigError(
            f"{_FLAG} wants verl 0.8.0 or later with its reward loop ({_REWARD}), found verl {verl.__version__}"
        )
    custom = get("reward.custom_reward_function.path")
    if get("reward.reward_model.enable", False):
        if not custom:
            reason = "the reward model alone gives the score"
            _refuse("reward.custom_reward_function.path", "a function", custom, reason)
        if not get("reward.reward_model.enable_resource_pool", False):
            reason = "on the trainer's own devices scores are taken in one go, and validation is not told from training"
            _refuse("reward.reward_model.enable_resource_pool", True, False, reason)
    agent_loop.check(config, _FLAG, "agent loops must tell validation from training")
    name = get(f"{_REWARD}.name")
    if get(f"{_REWARD}.source") == "register":
        from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER

        if name not in REWARD_MANAGER:
            _refuse(f"{_REWARD}.name", f"one of {', '.join(REWARD_MANAGER)}", name)


def _register(_settings: Any) -> None:
    from rl_accel.integrations.ray.reward_anchors import Collector

    metrics.observe("reward_timeout", Collector())


SWITCHES = (
    Registration(
        name="verl.reward_manager.reward_timeout",
        target=f"verl.experimental.reward_loop:{MANAGER}",
        register=_register,
        unregister=lambda: metrics.observe("reward_timeout", None),
        owner="rl_accel.integrations.ray.reward_anchors",
        find=lambda: metrics.observer("reward_timeout"),
    ),
)
