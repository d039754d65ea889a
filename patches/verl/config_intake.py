"""Reads the ``rl_accel`` section (``+rl_accel.*``) of verl's configuration as early as possible.

In the driver process, ``validate_config`` is wrapped, so that a misspelt key stops the run before a cluster starts. ``run_ppo`` is
wrapped as well, for the entry points in ``verl.experimental``. In the trainer process, the trainer's constructor is wrapped,
because the trainer that is really built decides which features may be on. Subclasses of RayPPOTrainer are wrapped, too, because
their constructors need not call that of RayPPOTrainer.
All trainers construct verl's logger, which refuses flags that none of these functions has read.

A feature that uses verl's extension points names a module in :attr:`~rl_accel.features.Feature.verl`, which has two functions.

- ``wire(run, flags)`` sets the feature's extension points in the configuration of a
  :class:`~rl_accel.patches.verl.verl_run.VerlRun`. A second call changes nothing. Raises ConfigError if the feature cannot work
  in this run.
- ``check_engine()``, optional, serves ``rl-accel doctor``. Returns, for each part of the feature that needs the engine, a verdict,
  the name of the part and the reason.
"""

import difflib
import functools
import importlib
import inspect
import logging
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_accel.config import AUTO, Flags
from rl_accel.errors import ConfigError, PatchRefused, first_line, refuse
from rl_accel.features import FEATURES, SKIP_ZERO, TAIL_BATCHING, Feature
from rl_accel.log import warn_once
from rl_accel.patches import seams
from rl_accel.patches.patch import Patch
from rl_accel.patches.seams import Registration
from rl_accel.patches.verl import interfaces
from rl_accel.patches.verl.interfaces import Trainer
from rl_accel.patches.verl.verl_run import FILTER_KEY, RAY_TRAINER_CLASS, TRAINERS, VerlRun
from rl_accel.runtime import CHECKS, FRAMEWORK, RUNTIME

logger = logging.getLogger("rl_accel")

SECTION = "rl_accel"
_SECTION_LIKE = re.compile("rl[_-]?accel(?![a-z])", re.IGNORECASE)
"""Pattern for a configuration key that is probably the section ``rl_accel`` misspelt, such as ``rl_accel_auto=True``."""


@dataclass
class _Process:
    """What this process has done with verl's configuration."""

    has_looked_for_flags: bool = False
    trainer: weakref.ref[Any] | None = None  # the trainer that was constructed last


_process = _Process()


def trainer() -> Any:
    """Returns the verl trainer that was constructed last in this process, or None if there is none."""
    return None if _process.trainer is None else _process.trainer()


def unread_flags() -> list[str]:
    """Returns the ``rl_accel`` flags on the command line; [] if this process has read them or disabled all features."""
    if _process.has_looked_for_flags or RUNTIME.sources() is None:
        return []
    return [word for word in sys.argv if word.lstrip("+").startswith(f"{SECTION}.")]


def resumed_checkpoint(trainer: Trainer) -> Path | None:
    """Returns the checkpoint folder from which ``trainer`` has resumed, or None. Must be called before the first training step."""
    config = trainer.config.trainer
    step = trainer.global_steps
    if config.resume_mode == "resume_path":
        return Path(config.resume_from_path)
    return Path(config.default_local_dir, f"global_step_{step}") if step else None


def wire(run: VerlRun, flags: Flags) -> tuple[dict[str, str], dict[str, str]]:
    """Sets verl's extension points for all features that are on, in the configuration of ``run``.

    Returns:
        ``idle``: mapping from each feature enabled by name that would have no effect in this run to the reason. ``refusals``:
        mapping from each automatic feature that cannot work in this run to the sentence with which it is refused by name.

    Raises:
        ConfigError: a feature enabled by name cannot work in this run.
        PatchRefused: a feature enabled by name cannot be applied to the installed verl.
    """
    idle: dict[str, str] = {}
    refusals: dict[str, str] = {}
    for feature in FEATURES:
        requested = flags.requested(feature)
        if requested == "off":
            continue
        try:
            run.require(feature.name)
            reason = run.idle(feature.name)
            if feature.verl:
                if not run.in_driver:  # the driver does not import verl's trainers
                    require_adapters(feature)
                importlib.import_module(feature.verl).wire(run, flags[feature])
        except (ConfigError, PatchRefused) as error:
            if requested == "by name":
                raise
            refusals[feature.name] = str(error)
            continue
        if reason and requested == "by name":
            idle[feature.name] = reason
    return idle, refusals


def require_adapters(feature: Feature[Any]) -> None:
    """Raises PatchRefused if the installed verl lacks functions that the adapters of ``feature`` use, or has them otherwise.

    The message names each function.
    """
    seams.require_members(feature.name, interfaces.NEEDS.get(feature.name, ()))


def in_driver(config: Any) -> None:
    """Applies the flags in verl's ``config`` in the driver process, and sets features' extension points in ``config``.

    Raises:
        ConfigError: a key is unknown, a value is invalid, or a feature cannot work with ``config``.
        PatchRefused: a feature enabled by name cannot be applied to the installed verl.
    """
    _take_in(config, in_driver=True)


def in_trainer(config: Any, trainer: Any = None) -> None:
    """Applies the flags in verl's ``config`` in the trainer process, while ``trainer`` is being built.

    Raises the exceptions of :func:`in_driver`, and ConfigError if a feature needs a setting that the driver process has not made
    (:meth:`VerlRun.require_chosen`).
    """
    if trainer is not None:
        _process.trainer = weakref.ref(trainer)
    _take_in(config, trainer)


def _require_section_name(config: Any) -> None:
    """Raises ConfigError if flags of rl-accel are outside the section ``rl_accel`` of verl's ``config``: they would go unread.

    Refused are:

    - a section ``rl_accel``, or True or False under a similar name, inside another section, such as ``trainer.rl_accel``;
    - a top-level section with a similar name, in which a key resembles the name of a feature;
    - a top-level section with the name of a feature, if it has the key ``enable`` and all keys resemble flags of the feature;
    - a top-level value without keys under a similar name, such as ``rlaccel=True``, or True under a feature's name.

    Everything else is taken for the user's own.
    """
    flags = {feature.name: {flag.name for flag in fields(feature.flags)} for feature in FEATURES}

    def is_close(word: Any, *known: str, cutoff: float = 0.6) -> bool:
        return bool(difflib.get_close_matches(str(word).lower(), known, cutoff=cutoff))

    def check(section: Any, path: str = "") -> None:
        for key, value in section.items():
            if key == SECTION and not path:
                continue
            inside = value if isinstance(value, dict) else {}
            is_like = bool(_SECTION_LIKE.match(str(key)))
            is_feature = key in flags
            if path:
                is_meant = key == SECTION or (is_like and isinstance(value, bool))
            elif not inside:
                is_meant = is_like or (is_feature and value is True)
            elif is_feature and "enable" in inside:
                is_meant = all(is_close(name, *flags[key]) for name in inside)
            else:
                is_meant = is_close(key, SECTION, cutoff=0.75) and any(is_close(name, AUTO, *flags) for name in inside)
            if is_meant:
                found = f"{path}{key}.enable" if is_feature and inside else f"{path}{key}"
                raise ConfigError(f"{FRAMEWORK}: flags of rl-accel belong in {SECTION}, found {found}")
            check(inside, f"{path}{key}.")

    check(OmegaConf.to_container(config))


def _take_in(config: Any, trainer: Any = None, in_driver: bool = False) -> None:
    if not OmegaConf.is_dict(config):  # a user's own trainer may take another type
        for feature in FEATURES:
            if RUNTIME.flags().requested(feature) == "by name" and (feature.verl or feature.name in TRAINERS):
                refuse(f"{SECTION}.{feature.name}", "type of the configuration", "DictConfig", type(config).__name__)
        return
    _process.has_looked_for_flags = True
    if in_driver:
        _require_section_name(config)
    run = VerlRun(config, trainer, in_driver)
    try:
        section = run.get(SECTION)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{FRAMEWORK}: {SECTION}: {first_line(error)}") from error
    if section is None and in_driver and FRAMEWORK in (RUNTIME.sources() or {}):
        section = {}  # flags of an earlier run of this process (hydra's --multirun) end with that run
    if section is not None:
        RUNTIME.set_source(FRAMEWORK, section)
    logged_before = (RUNTIME.sources() or {}).get(CHECKS, {})
    if logged_before:  # refusals of an earlier call, for example with another trainer, must not hide a feature now
        RUNTIME.set_source(CHECKS, {})
    flags = RUNTIME.flags()
    for warning in flags.warnings if in_driver else ():
        warn_once(warning, "rl-accel: %s", warning)
    idle, refusals = wire(run, flags)
    for name, reason in idle.items():
        if in_driver or not run.is_v1:  # else verl's V1 driver has logged it
            warn_once((name, reason), "rl-accel: %s is on and has nothing to do in this run: %s", name, reason)
    if trainer is not None and run.ignores_group_filter and flags.requested(SKIP_ZERO) != "off":
        note = f"verl's legacy trainer does not read {FILTER_KEY}: skip_zero leaves groups with equal rewards out of updates"
        warn_once(note, "rl-accel: %s", note)
    for name, reason in refusals.items():
        if name not in logged_before:
            warn_once((name, reason), "rl-accel: %s stays off: %s", name, reason, level=logging.INFO)
    if refusals:
        RUNTIME.set_source(CHECKS, dict.fromkeys(refusals, False))
    checkpoint = run.checkpoint_to_resume if in_driver and not flags[TAIL_BATCHING].enable else None
    if checkpoint is not None and (checkpoint / "tail_batching").is_dir():
        logger.warning(
            "rl-accel: tail_batching is off, and prompts that it had deferred in %s are not trained", checkpoint
        )


def take_in_call(function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Applies the flags in the argument ``config`` of a call of ``function`` (of a trainer's constructor, for example)."""
    arguments = inspect.signature(function).bind(*args, **kwargs).arguments
    if function.__name__ != "__init__":
        in_driver(arguments["config"])
    elif "config" in arguments:  # else a base class's constructor, called next, has the parameter config
        in_trainer(arguments["config"], args[0])


def _after_flags(original: Any, _settings: Any = None) -> Any:
    """Returns a wrapper of verl's function ``original`` that first applies the flags in the function's ``config`` argument."""

    @functools.wraps(original)
    def with_flags(*args: Any, **kwargs: Any) -> Any:
        # Ray pickles actor classes by value, including this function, which therefore must not use globals of this module.
        from rl_accel.patches.verl import config_intake

        config_intake.take_in_call(original, args, kwargs)
        return original(*args, **kwargs)

    return with_flags


def _refusing_unread_flags(original: Any, _settings: Any) -> Any:
    """Returns a wrapper of the constructor of verl's logger, which ends the program if nothing has read the flags in ``config``.

    An example is verl's SFT trainer, which no other patch of this module reaches.
    """

    def with_check(*args: Any, **kwargs: Any) -> None:
        config = inspect.signature(original).bind(*args, **kwargs).arguments.get("config")
        sources = RUNTIME.sources()
        if config and config.get(SECTION) and sources is not None and FRAMEWORK not in sources:
            message = f"this trainer reads no flags of {SECTION}: leave them out; RL_ACCEL=gae in the environment works"
            _process.has_looked_for_flags = True
            raise SystemExit(f"rl-accel: {FRAMEWORK}: {message}")  # verl-recipe's spin goes on after any Exception
        original(*args, **kwargs)

    return with_check


def _ray_trainer() -> Any:
    return getattr(sys.modules.get("verl.trainer.ppo.ray_trainer"), "RayPPOTrainer", None)


def _hook() -> Any:
    trainer = _ray_trainer()
    return trainer and vars(trainer).get("__init_subclass__")


def _constructors(cls: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each subclass of ``cls`` that defines a constructor, and this constructor."""
    for subclass in cls.__subclasses__():
        if constructor := vars(subclass).get("__init__"):
            yield subclass, constructor
        yield from _constructors(subclass)


def _wrap(cls: Any, constructor: Any) -> None:
    if not hasattr(constructor, "__rl_accel_original__"):
        cls.__init__ = _after_flags(constructor)
        cls.__init__.__rl_accel_original__ = constructor


def _wrap_subclasses(_settings: Any) -> None:
    trainer = _ray_trainer()

    def __init_subclass__(cls: Any, /, **kwargs: Any) -> None:
        super(trainer, cls).__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            _wrap(cls, cls.__init__)

    trainer.__init_subclass__ = classmethod(__init_subclass__)
    for cls, constructor in _constructors(trainer):
        _wrap(cls, constructor)


def _unwrap_subclasses() -> None:
    del _ray_trainer().__init_subclass__
    for cls, constructor in _constructors(_ray_trainer()):
        cls.__init__ = getattr(constructor, "__rl_accel_original__", constructor)


def _flag_reader(name: str, target: str, supports: str, *params: str, make: Any = _after_flags) -> Patch:
    return Patch(
        name=f"verl.config.{name}",
        target=target,
        supports=supports,
        params=(*params, "*"),  # only the configuration is read
        make=make,
        no_seam="verl hands the whole configuration to no plug-in: the entry point is imported before it is read",
        remove_when="verl hands its configuration to plug-ins",
    )


_RAY_TRAINER = ":".join(RAY_TRAINER_CLASS)

SWITCHES = (
    _flag_reader("driver", "verl.utils.config:validate_config", "verl>=0.6", "config"),
    _flag_reader("other_mains", "verl.trainer.main_ppo:run_ppo", "verl>=0.6", "config"),
    _flag_reader("trainer", "verl.trainer.ppo.v1.trainer_base:PPOTrainer.__init__", "verl>=0.9", "self", "config"),
    _flag_reader("legacy_trainer", f"{_RAY_TRAINER}.__init__", "verl>=0.6", "self", "config"),
    _flag_reader(
        "no_trainer", "verl.utils.tracking:Tracking.__init__", "verl>=0.6", "self", make=_refusing_unread_flags
    ),
    Registration(
        name="verl.config.recipe_trainers",
        target=f"{_RAY_TRAINER}.__init_subclass__",
        register=_wrap_subclasses,
        unregister=_unwrap_subclasses,
        owner=__name__,
        find=_hook,
    ),
)
