"""What is switched on in this process: flags come in, patches go on and off, and the flags travel to Ray processes.

There is one :class:`Runtime` a process, behind :func:`rl_accel.enable`, :func:`rl_accel.disable` and
:func:`rl_accel.status`. It imports no framework: a patch waits until the framework imports the module it changes.
"""

import importlib
import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rl_accel import config as cfg
from rl_accel.errors import ConfigError, PatchRefused, RlAccelError
from rl_accel.features import FEATURES, Feature, is_installed
from rl_accel.state import FeatureStatus, PatchStatus, Status

logger = logging.getLogger("rl_accel")

SOURCES_VAR = "RL_ACCEL_SOURCES"
"""Carries the resolved layers of a driver to its child processes; written by us, not meant to be set by hand."""

ENVIRONMENT, FRAMEWORK, KEYWORDS = f"environment {cfg.ENV_VAR}", "framework config", "rl_accel.enable()"
_PRECEDENCE = (ENVIRONMENT, FRAMEWORK, KEYWORDS)


class _Slot:
    """One patch of one feature in this process: waiting for its module, applied, or refused."""

    def __init__(self, patch: Any, feature: str) -> None:
        self.patch = patch
        self.feature = feature
        self.settings: Any = None
        self.named = False
        self.hook: Any = None
        self.refusal: str | None = None

    def state(self) -> str:
        if self.refusal is not None:
            return "refused"
        state = str(self.patch.state().value)
        return "waiting" if state == "pending" and self.hook is not None else state


class Runtime:
    """The switched-on features of one process. Methods are thread-safe; an error leaves everything as it was."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._layers: dict[str, dict[str, Any]] = {}
        self._slots: dict[str, _Slot] = {}
        self._warned: set[str] = set()

    # -- flags ---------------------------------------------------------------------------------------------------

    def set_layer(self, source: str, flags: Mapping[str, Any]) -> None:
        """Replace the flags that came from ``source``, bring patches in line and hand the flags to Ray processes.

        Raises:
            ConfigError: a flag is wrong.
            PatchRefused: a feature asked for by name cannot be applied; nothing of this call stays applied.
        """
        flags = cfg.normalise(flags, source)
        with self._lock:
            if self._layers.get(source) != flags:
                self._replace_layers({**self._layers, source: flags}, publish=True)

    def adopt(self, payload: str | None) -> None:
        """Take over what the driver of this process published, else what the environment says."""
        with self._lock:
            inherited = json.loads(payload) if payload else {}
            if not inherited:
                flags = cfg.read_environment()
                inherited = {ENVIRONMENT: flags} if flags else {}
            if inherited:
                self._replace_layers({**inherited, **self._layers}, publish=payload is None)

    def layers(self) -> dict[str, dict[str, Any]]:
        """Return a copy of the flags by source, to hand back to :meth:`restore`."""
        with self._lock:
            return dict(self._layers)

    def restore(self, layers: dict[str, dict[str, Any]]) -> None:
        """Return to the flags that :meth:`layers` gave earlier."""
        with self._lock:
            self._replace_layers(layers, publish=True)

    def clear(self) -> None:
        """Turn everything off: revert every patch, forget every flag, tell Ray processes started later."""
        self.restore({})

    def _replace_layers(self, layers: dict[str, dict[str, Any]], publish: bool) -> None:
        previous, self._layers = self._layers, layers
        try:
            self._bring_in_line()
        except BaseException:
            self._layers = previous
            self._bring_in_line()
            raise
        if publish:
            self._publish()

    def resolved(self) -> cfg.RlAccelConfig:
        """Return the flags in force: every layer merged, weakest first."""
        return cfg.resolve([(source, self._layers[source]) for source in _PRECEDENCE if source in self._layers])

    def _publish(self) -> None:
        payload = json.dumps(self._layers) if self._layers else None
        if payload is None:
            os.environ.pop(SOURCES_VAR, None)
        else:
            os.environ[SOURCES_VAR] = payload
        propagate = importlib.import_module("rl_accel.integrations.ray.propagate")
        propagate.publish(SOURCES_VAR, payload)

    # -- patches -------------------------------------------------------------------------------------------------

    def _bring_in_line(self) -> None:
        config = self.resolved()
        wanted: dict[str, tuple[Any, Feature, bool, Any]] = {}
        for feature in FEATURES:
            settings = getattr(config, feature.name)
            named = settings.enable is True
            if not (named or (settings.enable is None and config.auto and feature.automatic)):
                continue
            present = [name for name in feature.patches if is_installed(name)]
            if named and not present:
                raise PatchRefused(
                    f"{feature.name} was asked for, but none of {', '.join(feature.patches)} is installed here"
                )
            for framework in present:
                for module in feature.patches[framework]:
                    for patch in importlib.import_module(module).PATCHES:
                        wanted[patch.name] = (patch, feature, named, settings)
        for name in [name for name in self._slots if name not in wanted]:
            self._drop(name)
        for name, (patch, feature, named, settings) in wanted.items():
            slot = self._slots.get(name)
            if slot is not None and slot.settings == settings and slot.named == named:
                continue
            if slot is not None:
                self._drop(name)
            self._arm(patch, feature, named, settings)

    def _arm(self, patch: Any, feature: Feature, named: bool, settings: Any) -> None:
        from rl_accel.patches.post_import import when_imported

        slot = self._slots[patch.name] = _Slot(patch, feature.name)
        slot.named, slot.settings = named, settings
        module = patch.target.partition(":")[0]
        slot.hook = when_imported(module, lambda _module: self._apply(slot))

    def _apply(self, slot: _Slot) -> None:
        with self._lock:
            if self._slots.get(slot.patch.name) is not slot:
                return
            try:
                slot.patch.apply(slot.settings)
            except PatchRefused as error:
                slot.refusal = str(error)
                if slot.named:
                    self._revert_others(slot)
                    raise
                if slot.refusal not in self._warned:  # one warning, also when a later call brings the patch up again
                    self._warned.add(slot.refusal)
                    logger.warning("rl-accel: %s stays off: %s", slot.patch.name, error)

    def _revert_others(self, refused: _Slot) -> None:
        for slot in self._slots.values():
            if slot.feature == refused.feature and slot.refusal is None:
                slot.patch.revert()
                slot.refusal = f"reverted, because {refused.patch.name} was refused"

    def _drop(self, name: str) -> None:
        slot = self._slots[name]
        if slot.refusal is None:
            slot.patch.revert()
        if slot.hook is not None:
            slot.hook.cancel()
        del self._slots[name]

    # -- status --------------------------------------------------------------------------------------------------

    def status(self) -> Status:
        """Return what is on in this process, read from the live modules."""
        with self._lock:
            config = self.resolved()
            features = []
            for feature in FEATURES:
                enable = getattr(config, feature.name).enable
                automatic = enable is None and config.auto and feature.automatic
                slots = [slot for slot in self._slots.values() if slot.feature == feature.name]
                features.append(
                    FeatureStatus(
                        name=feature.name,
                        requested="by name" if enable else "automatically" if automatic else "off",
                        patches=tuple(
                            PatchStatus(s.patch.name, s.patch.target, s.state(), s.refusal or "") for s in slots
                        ),
                    )
                )
            return Status(
                pid=os.getpid(), sources=tuple(s for s in _PRECEDENCE if s in self._layers), features=tuple(features)
            )


RUNTIME = Runtime()


def enable(**features: Any) -> Status:
    """Turn features on in this process and in Ray processes that this program starts from now on.

    Without arguments (or with only ``feature=False``): every lossless speed-up, automatically; one that cannot work
    here logs a warning and stays off. With arguments: exactly the named features, ``gae=True`` or
    ``gae=dict(backend="numba")``; one that cannot work raises. A second call replaces the arguments of the first.

    Returns:
        The status after the call.

    Raises:
        ConfigError: an argument is unknown, has the wrong type or is out of range.
        PatchRefused: a feature asked for by name cannot be applied. Nothing stays half applied.
    """
    flags: dict[str, Any] = {}
    for name, value in features.items():
        flags[name] = {"enable": True, **value} if isinstance(value, Mapping) else value
    if not any(value is True or (isinstance(value, dict) and value["enable"]) for value in flags.values()):
        flags.setdefault("auto", True)
    RUNTIME.set_layer(KEYWORDS, flags)
    return RUNTIME.status()


def disable() -> Status:
    """Revert every patch in this process and leave the flags to no Ray process started later. Returns the status.

    Raises:
        PatchRefused: someone wrapped a patched function after us, so that it cannot be restored exactly.
    """
    RUNTIME.clear()
    return RUNTIME.status()


def status() -> Status:
    """Return what is switched on and applied in this process. ``print(rl_accel.status())`` shows a table."""
    return RUNTIME.status()


@contextmanager
def enabled(**features: Any) -> Iterator[Status]:
    """``with rl_accel.enabled(gae=True):`` turns features on inside the block and back after it."""
    before = RUNTIME.layers()
    try:
        yield enable(**features)
    finally:
        RUNTIME.restore(before)


__all__ = ["FRAMEWORK", "RUNTIME", "ConfigError", "RlAccelError", "disable", "enable", "enabled", "status"]
