"""Adaptive time limits for rewards on verl: ``+rl_accel.reward_timeout.enable=True``.

Only official seams: a reward manager and a part of agent-loop workers, both chosen by :func:`wire` in the configuration. In a
reward worker ``manager`` holds the reward manager that was configured and gives it a function of ours to score with, which runs
the user's function, or verl's own (``code_rewards``), within limits. In an agent-loop worker :data:`WORKER_PART` tells validation
from training, and goes on without a reward worker that dies. What is counted reaches the trainer's log by the store of anchors.
"""

import functools
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf, open_dict

from rl_accel.errors import ConfigError, refuse
from rl_accel.features import RewardTimeoutFlags
from rl_accel.integrations.verl import agent_loop
from rl_accel.patches.seams import Registration
from rl_accel.patches.verl import config_intake
from rl_accel.patches.verl.verl_run import VerlRun
from rl_accel.telemetry import metrics

MANAGER = "RewardTimeoutManager"
MANAGER_MODULE = "pkg://rl_accel.integrations.verl.reward_timeout.manager"
"""The values of ``reward.reward_manager.name`` and ``.module.path``."""

SECTION = "reward_timeout"
"""What every process finds under ``reward`` in verl's configuration: the flags, the manager that is held, where anchors go."""

WORKER_PART = f"{__name__}.validation.Marking"
"""What this feature adds to agent-loop workers."""

_FLAG = "rl_accel.reward_timeout"
_refuse = functools.partial(refuse, _FLAG)
_REWARD = "reward.reward_manager"


def wire(run: VerlRun, flags: RewardTimeoutFlags) -> None:
    """Choose our reward manager and agent loops in the configuration of ``run``. Idempotent.

    Raises:
        ConfigError: something in it cannot go together with this feature, or a flag does not fit.
    """
    _check(run)
    config = run.config
    manager = config.reward.reward_manager
    held = {"source": manager.source, "name": manager.name, "path": manager.module.path}
    held = run.get(f"reward.{SECTION}.manager", held)
    folder = run.get("trainer.default_local_dir")
    # Ray processes of other jobs' folders would read a relative path differently.
    anchors = str(Path(os.path.abspath(folder), "rl_accel_reward_anchors.json")) if folder else None
    section = {"flags": asdict(flags), "manager": held, "anchors": run.get(f"reward.{SECTION}.anchors", anchors)}
    with open_dict(config):
        manager.source, manager.name, manager.module.path = "importlib", MANAGER, MANAGER_MODULE
        OmegaConf.update(config, f"reward.{SECTION}", section, merge=False)
    agent_loop.choose(run, WORKER_PART)


def _check(run: VerlRun) -> None:
    """Refuse what this feature cannot work with."""
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


def _register(_settings: Any) -> None:
    from rl_accel.integrations.ray import reward_anchors

    collect = reward_anchors.Collector()

    def observe(step: int, logged: Mapping[str, Any]) -> dict[str, float]:
        manager = getattr(config_intake.trainer(), "reward_loop_manager", None)
        if workers := getattr(manager, "reward_loop_worker_handles", None):
            reward_anchors.flush(workers)
        return collect(step, logged)

    metrics.observe("reward_timeout", observe)


SWITCHES = (
    Registration(
        name="verl.reward_manager.reward_timeout",
        target=f"verl.experimental.reward_loop:{MANAGER}",
        register=_register,
        unregister=lambda: metrics.observe("reward_timeout", None),
        owner=__name__,
        find=lambda: metrics.observer("reward_timeout"),
    ),
)
