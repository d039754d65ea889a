"""Reads ``+rl_accel.*`` from the configuration of a verl run, where verl first holds it.

In the driver that is ``validate_config``, so that a misspelt key stops the run before a cluster starts. In the
trainer process it is the constructor of the trainer, which also serves drivers that call neither ``main_ppo`` nor
``validate_config``. These are the only functions of verl that the pack wraps without being asked.

A feature that stands on verl's extension points has a module (:attr:`~rl_accel.features.Feature.verl`) with

- ``SEAMS``: what it needs of verl, for :func:`rl_accel.patches.seams.require`,
- ``wire(config, flags)``, which chooses its extension points in ``config`` (verl's, changed in place), idempotent,
- ``refuse_unwired(config)``, which stops a trainer whose driver has not called ``validate_config``,
- ``find_problems()``, if ``rl-accel doctor`` is to tell more: pairs of what does not work here and why.

``wire`` and ``refuse_unwired`` raise ConfigError where the configuration and the feature cannot go together.
"""

import functools
import importlib
import inspect
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rl_accel.features import FEATURES
from rl_accel.patches import seams
from rl_accel.patches.patch import Patch
from rl_accel.runtime import FRAMEWORK, RUNTIME

_trainer: Callable[[], Any] = lambda: None  # noqa: E731 (a weak reference takes its place)
_NO_SEAM = "verl hands the whole configuration to no plug-in: the entry point is imported before it is read"


def trainer() -> Any:
    """Return the trainer that was constructed last in this process, or None."""
    return _trainer()


def resumed_from(trainer: Any) -> Path | None:
    """Return the folder of the checkpoint that ``trainer``, which is before its first step, goes on from; None: of none."""
    config, step = trainer.config.trainer, trainer.global_steps
    if config.resume_mode == "resume_path":
        return Path(config.resume_from_path)
    return Path(config.default_local_dir, f"global_step_{step}") if step else None


def _take_in(config: Any) -> None:
    """Put the ``rl_accel`` section of a verl ``config`` in force, if there is one."""
    flags = OmegaConf.select(config, "rl_accel", default=None)
    if flags is not None:
        RUNTIME.set_layer(FRAMEWORK, flags)


def _wired_features() -> Iterator[tuple[str, Any, Any]]:
    """Name, wiring module and flags of each feature that is on and stands on verl's extension points."""
    flags = RUNTIME.flags()
    for feature in FEATURES:
        if feature.verl and flags.requested(feature) != "off":
            yield feature.name, importlib.import_module(feature.verl), flags[feature]


def in_driver(config: Any) -> None:
    """Take the flags of ``config`` in and choose in it the extension points of features that are on, whoever named them.

    Raises:
        ConfigError: a key is unknown, a value unusable, or ``config`` and a feature cannot go together.
        PatchRefused: a feature asked for by name cannot be applied to this verl.
    """
    _take_in(config)
    for name, wiring, flags in _wired_features():
        seams.require_modules(name, wiring.SEAMS)  # the functions in them are checked where verl imports them anyway
        wiring.wire(config, flags)


def in_trainer(config: Any) -> None:
    """Take the flags of ``config`` in, and stop a trainer that was chosen before anyone could wire a feature that is on.

    Raises:
        ConfigError, PatchRefused: as :func:`in_driver`; or the driver has not called ``validate_config``.
    """
    _take_in(config)
    for name, wiring, _ in _wired_features():
        seams.require(name, wiring.SEAMS)
        wiring.refuse_unwired(config)


def _before(step: Callable[[Any], None]) -> Any:
    """Return the ``make`` of a patch that calls ``step`` with the function's ``config`` before the function runs."""

    def make(original: Any, _settings: Any) -> Any:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def with_flags(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            step(arguments["config"])
            if "self" in arguments:
                global _trainer
                _trainer = weakref.ref(arguments["self"])
            return original(*args, **kwargs)

        return with_flags

    return make


SWITCHES = (
    Patch(
        name="verl.config.driver",
        target="verl.utils.config:validate_config",
        supports="verl>=0.6",
        params=("config", "use_reference_policy", "use_critic"),
        make=_before(in_driver),
        no_seam=_NO_SEAM,
    ),
    Patch(
        name="verl.config.trainer",
        target="verl.trainer.ppo.v1.trainer_base:PPOTrainer.__init__",
        supports="verl>=0.9",
        params=("self", "config"),
        make=_before(in_trainer),
        no_seam=_NO_SEAM,
    ),
    Patch(
        name="verl.config.legacy_trainer",
        target="verl.trainer.ppo.ray_trainer:RayPPOTrainer.__init__",
        supports="verl>=0.6",
        params=(
            "self",
            "config",
            "tokenizer",
            "role_worker_mapping",
            "resource_pool_manager",
            "ray_worker_group_cls",
            "processor",
            "train_dataset",
            "val_dataset",
            "collate_fn",
            "train_sampler",
            "device_name",
        ),
        make=_before(in_trainer),
        no_seam=_NO_SEAM,
    ),
)
