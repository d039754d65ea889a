"""Reads ``+rl_accel.*`` from the configuration of a verl run, where verl first holds it.

In the driver that is ``validate_config``, so that a misspelt key stops the run before a cluster starts. In the
trainer process it is the constructor of the trainer, which also serves drivers that call neither ``main_ppo`` nor
``validate_config``.
"""

import functools
import importlib
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from rl_accel.errors import PatchRefused
from rl_accel.patches.patch import Patch
from rl_accel.patches.post_import import when_imported

logger = logging.getLogger("rl_accel")
_WIRINGS = {
    "tail_batching": "rl_accel.integrations.verl.tail_batching.wiring",
    "reward_timeout": "rl_accel.integrations.verl.reward_timeout.wiring",
    "telemetry": "rl_accel.integrations.verl.telemetry.wiring",
    "tp_replan": "rl_accel.integrations.verl.tp_replan.wiring",
}
"""Features on official seams, in the order in which they choose them: modules with ``wire`` and ``refuse_unwired``."""
_trainer: Callable[[], Any] = lambda: None  # noqa: E731 (a weak reference takes its place)
_NO_SEAM = "verl hands the whole configuration to no plug-in: the entry point is imported before it is read"


def take_in(config: Any) -> None:
    """Put the ``rl_accel`` section of a verl ``config`` in force, if there is one.

    Raises:
        ConfigError: a key is unknown or a value unusable.
        PatchRefused: a feature asked for by name cannot be applied.
    """
    from omegaconf import OmegaConf

    flags = OmegaConf.select(config, "rl_accel", default=None)
    if flags is not None:
        from rl_accel.runtime import FRAMEWORK, RUNTIME

        RUNTIME.set_layer(FRAMEWORK, flags)


def wire(config: Any) -> None:
    """Choose in ``config`` the official seams that features which are on (whatever switched them on) stand on.

    Raises:
        ConfigError: the configuration and a feature cannot go together.
    """
    for wiring, flags in _switched_on():
        wiring.wire(config, flags)


def refuse_unwired(config: Any) -> None:
    """Stop a trainer that was chosen before anyone could wire a feature that is on.

    Raises:
        ConfigError: a driver built the trainer without ``validate_config``, or on a trainer that has no seams.
    """
    for wiring, _ in _switched_on():
        wiring.refuse_unwired(config)


def trainer() -> Any:
    """Return the V1 trainer that was constructed last in this process, or None."""
    return _trainer()


def _remember(trainer: Any) -> None:
    global _trainer
    _trainer = weakref.ref(trainer)


def _switched_on() -> Iterator[tuple[Any, Any]]:
    """The wiring and the flags of each feature that is on."""
    from rl_accel.runtime import RUNTIME

    for name, module in _WIRINGS.items():
        flags = getattr(RUNTIME.resolved(), name)
        if flags.enable:
            yield importlib.import_module(module), flags


def _first(*steps: Any) -> Any:
    """Return the ``make`` of a patch that hands the function's ``config`` to ``steps`` before the function runs."""

    def make(original: Any, _settings: Any) -> Any:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def with_flags(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            for step in steps:
                step(given["config"])
            if "self" in given:
                _remember(given["self"])
            return original(*args, **kwargs)

        return with_flags

    return make


PATCHES = (
    Patch(
        name="verl.config.driver",
        feature="config",
        target="verl.utils.config:validate_config",
        supports="verl>=0.6",
        params=("config", "use_reference_policy", "use_critic"),
        make=_first(take_in, wire),
        no_seam=_NO_SEAM,
    ),
    Patch(
        name="verl.config.trainer",
        feature="config",
        target="verl.trainer.ppo.v1.trainer_base:PPOTrainer.__init__",
        supports="verl>=0.9",
        params=("self", "config"),
        make=_first(take_in, refuse_unwired),
        no_seam=_NO_SEAM,
    ),
    Patch(
        name="verl.config.legacy_trainer",
        feature="config",
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
        make=_first(take_in, refuse_unwired),
        no_seam=_NO_SEAM,
    ),
)


def watch() -> None:
    """Apply the patches of this file and of ``trainer_metrics`` as verl imports their modules. Never raises later.

    A place that cannot be patched costs one warning: flags given in the run's configuration are then not seen there.
    """
    metrics = importlib.import_module("rl_accel.patches.verl.trainer_metrics")
    for patch in (*PATCHES, *metrics.PATCHES):
        when_imported(patch.target.partition(":")[0], functools.partial(_apply_or_warn, patch))


def _apply_or_warn(patch: Patch, _module: Any) -> None:
    try:
        patch.apply(None)
    except PatchRefused as error:
        logger.warning("rl-accel: flags or metrics of a verl run may be ignored here: %s", error)
