"""Puts the reward manager and the agent loops of this feature into verl's configuration, or says why they cannot work."""

import inspect
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf, open_dict

from rl_accel.errors import ConfigError
from rl_accel.features.reward_timeout import RewardTimeoutFlags
from rl_accel.integrations.verl import agent_loop
from rl_accel.integrations.verl.reward_timeout import MANAGER, MANAGER_MODULE, SECTION, WORKER_PART
from rl_accel.patches.seams import Seams
from rl_accel.reward.adaptive_timeout import TimeoutSettings

SEAMS: Seams = {
    "verl.experimental.agent_loop.agent_loop:AgentLoopWorker._compute_score": ("self", "outputs", "kwargs"),
    "verl.experimental.agent_loop.agent_loop:AgentLoopWorker._agent_loop_postprocess": ("self", "output", "validate"),
    "verl.experimental.reward_loop.reward_manager.registry:REWARD_MANAGER": None,
}
"""Agent loops must tell validation from training; verl 0.9.1 has them."""
_FLAG = "rl_accel.reward_timeout"
_REWARD = "reward.reward_manager"
_ANCHORS = "rl_accel_reward_anchors.json"
_SETTINGS = ("scale", "slack", "minimum", "maximum", "min_correct", "probe_share")


@dataclass(frozen=True)
class Wired:
    """What :func:`wire` left in the configuration.

    Attributes:
        flags: the flags of this feature.
        source, name, path: the reward manager that was configured, as verl names it.
        anchors: the file of the anchors; None: they are not saved.
    """

    flags: RewardTimeoutFlags
    source: str
    name: str
    path: str | None
    anchors: str | None

    @property
    def settings(self) -> TimeoutSettings:
        """Return the parameters of the policy."""
        return TimeoutSettings(**{name: getattr(self.flags, name) for name in _SETTINGS})


def wire(config: Any, flags: RewardTimeoutFlags) -> None:
    """Choose our reward manager and agent loops in ``config`` (verl's, changed in place). Idempotent.

    Raises:
        ConfigError: something in ``config`` cannot go together with this feature, or a flag does not fit.
    """
    check(config)
    manager = config.reward.reward_manager
    found = wired(config) if is_wired(config) else None
    held = (found.source, found.name, found.path) if found else (manager.source, manager.name, manager.module.path)
    folder = OmegaConf.select(config, "trainer.default_local_dir", default=None)
    section = {
        **{field.name: getattr(flags, field.name) for field in fields(flags)},
        "manager": dict(zip(("source", "name", "path"), held, strict=True)),
        # Ray processes of other jobs' folders would read a relative path differently.
        "anchors": str(Path(os.path.abspath(folder)) / _ANCHORS) if folder else None,
    }
    with open_dict(config):
        manager.source, manager.name, manager.module.path = "importlib", MANAGER, MANAGER_MODULE
        OmegaConf.update(config, f"reward.{SECTION}", section, merge=False)
    agent_loop.choose(config, WORKER_PART)
    try:
        _ = wired(config).settings
    except ValueError as error:
        raise ConfigError(f"{_FLAG}: {error}") from error


def is_wired(config: Any) -> bool:
    """Whether ``config`` has been through :func:`wire`."""
    return OmegaConf.select(config, f"reward.{SECTION}", default=None) is not None


def wired(config: Any) -> Wired:
    """Return what :func:`wire` left in ``config``."""
    section = OmegaConf.to_container(config.reward[SECTION])
    manager, anchors = section.pop("manager"), section.pop("anchors")
    return Wired(RewardTimeoutFlags(**section), **manager, anchors=anchors)


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

    if get(_REWARD) is None or not _tells_validation():
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


def _tells_validation() -> bool:
    try:
        from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

        wanted = {
            "_compute_score": ["self", "outputs", "kwargs"],
            "_agent_loop_postprocess": ["self", "output", "validate"],
        }
        return all(
            list(inspect.signature(getattr(AgentLoopWorker, name)).parameters)[: len(names)] == names
            for name, names in wanted.items()
        )
    except (ImportError, AttributeError):
        return False


def _refuse(key: str, wanted: Any, found: Any, reason: str = "") -> None:
    raise ConfigError(f"{_FLAG} wants {key} = {wanted}, found {found}" + (f" ({reason})" if reason else ""))
