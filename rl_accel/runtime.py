"""What is switched on in this process: flags come in, patches go on and off, and the flags travel to Ray processes.

There is one :class:`Runtime` a process, behind :func:`rl_accel.enable`, :func:`rl_accel.disable` and
:func:`rl_accel.status`. It imports no framework: a patch waits until the framework imports the module it changes.
"""

import functools
import importlib
import importlib.util
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from rl_accel import config as cfg
from rl_accel import log
from rl_accel.errors import NotInThisVersion, PatchRefused
from rl_accel.features import FEATURES, FLAG_READERS, LOGGERS
from rl_accel.post_import import when_imported
from rl_accel.switch import FeatureStatus, Status, Switch, SwitchStatus

logger = logging.getLogger("rl_accel")

SOURCES_VAR = "RL_ACCEL_SOURCES"
"""Carries the resolved layers of a driver to its child processes; written by us, not meant to be set by hand."""

ENVIRONMENT, FRAMEWORK, KEYWORDS = f"environment {cfg.ENV_VAR}", "framework config", "rl_accel.enable()"
_PRECEDENCE = (ENVIRONMENT, FRAMEWORK, KEYWORDS)
_FLAG_READER, _LOGGER = "reading flags", "logging"


@dataclass(eq=False)
class _Slot:
    """One switch in this process.

    Attributes:
        owner: the feature it belongs to, ``_FLAG_READER`` or ``_LOGGER``.
        named: an error if it cannot be applied; else a warning.
        settings: flags of its feature.
        refusal: why it could not be applied.
    """

    switch: Switch
    owner: str
    named: bool
    settings: Any
    refusal: str | None = None
    unsupported: bool = False

    def status(self) -> SwitchStatus:
        state = str(self.switch.state().value)
        if self.refusal is not None:
            state = "unsupported" if self.unsupported else "refused"
        return SwitchStatus(self.switch.name, self.switch.target, state, self.refusal or "")


class Runtime:
    """The switched-on features of one process. Methods are thread-safe; an error leaves everything as it was."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._layers: dict[str, dict[str, Any]] = {}
        self._flags = cfg.resolve([])
        self._reads_flags = False
        self._slots: dict[str, _Slot] = {}
        self._warned: set[str] = set()

    def flags(self) -> cfg.Flags:
        """Return the flags in force: every layer merged, weakest first."""
        return self._flags

    def read_flags(self) -> None:
        """Read flags from the configuration of frameworks as well, until :meth:`clear`. Idempotent."""
        with self._lock:
            self._reads_flags = True
            self._bring_in_line()

    def set_layer(self, source: str, flags: Any) -> None:
        """Replace the flags that came from ``source``, bring switches in line and hand the flags to Ray processes.

        Raises:
            ConfigError: a flag is wrong.
            PatchRefused: a feature asked for by name cannot be applied; nothing of this call stays applied.
        """
        flags = cfg.as_mapping(flags, source)
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
        """Turn everything off: put every original object back, forget every flag, tell Ray processes started later."""
        with self._lock:
            self._reads_flags = False
            self.restore({})

    def _replace_layers(self, layers: dict[str, dict[str, Any]], publish: bool) -> None:
        before = self._layers, self._flags
        flags = cfg.resolve([(source, layers[source]) for source in _PRECEDENCE if source in layers])
        self._layers, self._flags = layers, flags
        try:
            self._bring_in_line()
        except BaseException:
            self._layers, self._flags = before
            self._bring_in_line()
            raise
        if publish:
            self._publish()

    def _publish(self) -> None:
        payload = json.dumps(self._layers) if self._layers else None
        os.environ.pop(SOURCES_VAR, None)
        if payload is not None:
            os.environ[SOURCES_VAR] = payload
        importlib.import_module("rl_accel.integrations.ray.propagate").publish(payload)

    def _bring_in_line(self) -> None:
        wanted = {slot.switch.name: slot for slot in self._wanted()}
        for name, slot in list(self._slots.items()):
            fresh = wanted.get(name)
            if fresh is not None and (fresh.settings, fresh.named) == (slot.settings, slot.named):
                del wanted[name]
                continue
            if slot.refusal is None:
                slot.switch.revert()
            del self._slots[name]
        self._slots.update(wanted)
        for slot in wanted.values():
            module = slot.switch.target.partition(":")[0]
            when_imported(module, functools.partial(self._apply, slot))

    def _wanted(self) -> Iterator[_Slot]:
        on = False
        for feature in FEATURES:
            requested = self._flags.requested(feature)
            if requested == "off":
                continue
            named, on = requested == "by name", True
            installed = [framework for framework in feature.switches if is_installed(framework)]
            if named and not installed:
                raise PatchRefused(
                    f"{feature.name} was asked for, but none of {', '.join(feature.switches)} is installed here"
                )
            for framework in installed:
                for module in feature.switches[framework]:
                    for switch in switches_of(module):
                        yield _Slot(switch, feature.name, named, self._flags[feature])
        for owner, modules, wanted in (
            (_FLAG_READER, FLAG_READERS, on or self._reads_flags),
            (_LOGGER, LOGGERS, on),
        ):
            for framework, module in modules.items():
                if wanted and is_installed(framework):
                    for switch in switches_of(module):
                        yield _Slot(switch, owner, False, None)

    def _apply(self, slot: _Slot, _module: ModuleType) -> None:
        with self._lock:
            if self._slots.get(slot.switch.name) is not slot:
                return  # turned off while it waited
            try:
                slot.switch.apply(slot.settings)
            except PatchRefused as error:
                slot.refusal = str(error)
                others = (s for s in self._slots.values() if s.owner == slot.owner and s.refusal is None)
                slot.unsupported = isinstance(error, NotInThisVersion)
                if slot.named and not (slot.unsupported and any(others)):
                    self._revert_others(slot)
                    raise
                if slot.refusal not in self._warned:  # one warning, also when a later call brings the switch up again
                    self._warned.add(slot.refusal)
                    logger.warning("rl-accel: %s stays off: %s", slot.switch.name, error)

    def _revert_others(self, refused: _Slot) -> None:
        for slot in self._slots.values():
            if slot.owner == refused.owner and slot.refusal is None:
                slot.switch.revert()
                slot.refusal = f"reverted, because {refused.switch.name} was refused"

    def status(self) -> Status:
        """Return what is on in this process, read from the live modules."""
        with self._lock:
            features = [
                FeatureStatus(feature.name, self._flags.requested(feature), self._status_of(feature.name))
                for feature in FEATURES
            ]
            return Status(
                pid=os.getpid(),
                sources=tuple(s for s in _PRECEDENCE if s in self._layers),
                features=tuple(features),
                flag_readers=self._status_of(_FLAG_READER),
                loggers=self._status_of(_LOGGER),
            )

    def _status_of(self, owner: str) -> tuple[SwitchStatus, ...]:
        return tuple(slot.status() for slot in self._slots.values() if slot.owner == owner)


def switches_of(module: str) -> tuple[Switch, ...]:
    """Import ``module`` and return its ``SWITCHES``."""
    switches: tuple[Switch, ...] = importlib.import_module(module).SWITCHES
    return switches


def is_installed(framework: str) -> bool:
    """Whether the package ``framework`` can be imported here; does not import it."""
    if framework in sys.modules:
        return True
    try:
        return importlib.util.find_spec(framework) is not None
    except (ImportError, ValueError):
        return False


RUNTIME = Runtime()
log.set_up()


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
    """Put every original object back in this process and leave flags to no Ray process started later. Returns the status.

    Flags in a framework's configuration are no longer read here either.

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
