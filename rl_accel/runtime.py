"""Applies and reverts switches (changes to a framework) according to the flags, and passes the flags on to Ray processes.

The runtime imports no framework. A patch is applied when the framework imports the module to be patched.
"""

import functools
import importlib
import importlib.util
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from rl_accel import __version__, log
from rl_accel import config as cfg
from rl_accel.errors import ConfigError, NotInThisVersion, PatchRefused
from rl_accel.features import FEATURES, FLAG_READER, METRICS_LOGGER, F, Feature
from rl_accel.post_import import wait_for_import, when_imported
from rl_accel.switch import FeatureStatus, Status, Switch, SwitchStatus, forget_when_off

logger = logging.getLogger("rl_accel")

SOURCES_VAR = "RL_ACCEL_SOURCES"
"""Environment variable that passes the driver process's flags, as JSON, to child processes. Not for users."""
FLAG_VARIABLES = (cfg.NAMES_VAR, cfg.ENV_VAR, SOURCES_VAR)
"""Names of all environment variables from which a process takes flags."""

NAMES = f"environment {cfg.NAMES_VAR}"
ENVIRONMENT = f"environment {cfg.ENV_VAR}"
FRAMEWORK = "framework config"
KEYWORDS = "rl_accel.enable()"
CHECKS = "checks of the framework config"
"""Name of the source that turns automatic features off which cannot work in this run. A feature that is named stays on."""
_PRECEDENCE = (CHECKS, NAMES, ENVIRONMENT, FRAMEWORK, KEYWORDS)
"""Names of all sources of flags. A later source overrides the earlier ones."""
FlagSources = dict[str, dict[str, Any]] | None
"""Mapping from the name of a source (such as an environment variable) to its flags. None: :func:`disable` was called, so that all
features are off and no source counts."""
_VERSION = "version"
"""Key of rl-accel's version in the flags that a driver process passes on; all other keys are names of sources."""


@dataclass(eq=False)
class _WantedSwitch:
    """A switch (a reversible change to a framework) that the flags ask for in this process, applied or not."""

    switch: Switch
    owner: str  # name of the feature, or FLAG_READER or METRICS_LOGGER
    named: bool  # True if enabled by name: a switch that cannot be applied is then an error, not a warning
    settings: Any  # flags of the feature
    refusal: PatchRefused | None = None  # reason why the switch is not applied

    def status(self) -> SwitchStatus:
        state = str(self.switch.state().value)
        if self.refusal is not None:
            state = "unsupported" if isinstance(self.refusal, NotInThisVersion) else "refused"
        return SwitchStatus(self.switch.name, self.switch.target, state, str(self.refusal or ""))


class Runtime:
    """Flags and switches (reversible changes to frameworks) of one process. Thread-safe. A failed call changes nothing."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._sources: FlagSources = {}
        self._flags = _resolve({})
        self._reads_flags = False
        self._switches: dict[str, _WantedSwitch] = {}
        self._warned: set[str] = set()  # refusals that a later call does not log again

    def flags(self) -> cfg.Flags:
        """Returns the flags in force, merged from all sources."""
        return self._flags

    def flags_of(self, feature: Feature[F]) -> F:
        """Returns the flags of ``feature``, which is on in the Ray job of this process.

        Raises ConfigError if it is off here: the flags of the job have not reached this process.
        """
        if self._flags.requested(feature) == "off":
            raise ConfigError(
                f"rl_accel.{feature.name} is on in this run, but off in process {os.getpid()}: it has imported the framework "
                "before the flags were known, or disable() was called since. Call enable() before the first Ray task"
            )
        return self._flags[feature]

    def set_source(self, source: str, flags: Any) -> None:
        """Replaces the flags of ``source``. Turns features on or off to match, and passes all flags on to Ray processes.

        Raises:
            ConfigError: a flag is unknown or invalid.
            PatchRefused: a feature enabled by name cannot be applied. All changes of this call are undone.
        """
        flags = cfg.as_mapping(flags, source)
        present = self._sources
        if present and present.get(source) == flags:
            return
        self._change(lambda sources: {**(sources or _environment()), source: flags}, publish=True)

    def adopt(self, payload: str | None) -> None:
        """Applies the flags of the Ray job to which this process belongs. The framework's configuration counts from then on, too.

        Does nothing after :func:`disable`. ``payload`` holds the flags of the job's driver process, by source, as JSON. ``null``
        means that the driver process has called :func:`disable`, None or ``{}`` that it has no flags. For a source that is not in
        ``payload``, this process's own environment variables count.
        """
        if self._sources is None:
            return
        logger.debug("rl-accel: flags received from the driver: %s", payload)
        inherited = _received(payload) if payload else {}
        if inherited is not None:  # Ray's runtime_env may set variables that the driver lacks
            inherited = {**_environment(inherited), **inherited}
        if inherited is None and any(word.lstrip("+").startswith("rl_accel.") for word in sys.argv):
            logger.warning(
                "rl-accel: the flags of this command are ignored, because the program that started it has called disable()"
            )
        self._reads_flags = True

        def with_inherited(sources: FlagSources) -> FlagSources:
            if inherited is None or sources is None:
                return None
            return {**inherited, **sources}

        self._change(with_inherited, publish=payload is None and bool(inherited or self._sources))

    def sources(self) -> FlagSources:
        """Returns the flags of each source, for a later :meth:`restore`. None after :func:`disable`."""
        return self._sources

    def restore(self, sources: FlagSources) -> None:
        """Replaces all flags by ``sources``, an earlier result of :meth:`sources`. None turns all features off."""
        self._change(lambda _sources: sources, publish=True)

    def _change(self, new_sources: Callable[[FlagSources], FlagSources], publish: bool) -> None:
        """Replaces the flags of all sources by ``new_sources(present flags)``, and switches the features to match.

        Modules are imported while the lock is free, because import hooks in other threads need it.
        """
        while True:
            with self._lock:
                before = self._sources
                sources = new_sources(before)
                flags = _resolve(sources)
                missing = [module for module in self._switch_modules(sources, flags) if not _has_switches(module)]
                if not missing:
                    break
            for module in missing:
                wait_for_import(module)
        try:
            self._switch_to(sources, flags)
        except BaseException as error:
            try:
                self._switch_to(before, _resolve(before))
            except Exception as second:
                error.add_note(f"The state before could not be restored either: {second}")
            raise
        if all(flags.requested(feature) == "off" for feature in FEATURES):
            for forget in forget_when_off:
                forget()
        if publish:
            self._publish()

    def _switch_to(self, sources: FlagSources, flags: cfg.Flags) -> None:
        with self._lock:
            self._sources = sources
            self._flags = flags
            fresh = self._replace_switches()
        for wanted in fresh:  # without the lock: another thread may be importing the switch's module, and is waited for
            when_imported(wanted.switch.module, functools.partial(self._apply, wanted))

    def _publish(self) -> None:
        os.environ.pop(SOURCES_VAR, None)
        payload = None  # there is nothing to pass on
        if self._sources is None:
            payload = json.dumps(None)  # all features are off
        elif self._sources:
            payload = json.dumps({**self._sources, _VERSION: __version__})
        if payload is not None:
            os.environ[SOURCES_VAR] = payload
        logger.debug("rl-accel: flags passed on to the processes of Ray: %s", payload)
        importlib.import_module("rl_accel.integrations.ray.propagate").publish(payload)

    def _replace_switches(self) -> list[_WantedSwitch]:
        """Reverts switches that the flags no longer ask for. Returns those that they ask for anew, which are to be applied."""
        fresh = {wanted.switch.name: wanted for wanted in self._wanted()}
        for name, present in list(self._switches.items()):
            wanted = fresh.get(name)
            if wanted is not None and (wanted.settings, wanted.named) == (present.settings, present.named):
                del fresh[name]
                continue
            if present.refusal is None:
                present.switch.revert()
            del self._switches[name]
        self._switches.update(fresh)
        return list(fresh.values())

    def _switch_modules(self, sources: FlagSources, flags: cfg.Flags) -> Iterator[str]:
        """Yields the names of the modules whose switches ``flags`` ask for."""
        any_on = False
        for feature in FEATURES:
            requested = flags.requested(feature)
            if requested == "off":
                continue
            any_on = True
            installed = [framework for framework in feature.switches if is_installed(framework)]
            if requested == "by name" and not installed:
                wanted_frameworks = ", ".join(feature.switches)
                raise PatchRefused(f"{feature.name} was asked for, but none of {wanted_frameworks} is installed here")
            for framework in installed:
                yield from feature.switches[framework]
        if is_installed("verl"):
            if any_on or (self._reads_flags and sources is not None):
                yield FLAG_READER
            if any_on:
                yield METRICS_LOGGER

    def _wanted(self) -> Iterator[_WantedSwitch]:
        owners = {
            module: feature for feature in FEATURES for modules in feature.switches.values() for module in modules
        }
        for module in self._switch_modules(self._sources, self._flags):
            for switch in switches_of(module):
                if feature := owners.get(module):
                    is_by_name = self._flags.requested(feature) == "by name"
                    yield _WantedSwitch(switch, feature.name, is_by_name, self._flags[feature])
                else:
                    yield _WantedSwitch(switch, module, False, None)

    def _apply(self, wanted: _WantedSwitch, _module: ModuleType) -> None:
        with self._lock:
            if self._switches.get(wanted.switch.name) is not wanted:
                return  # the switch was turned off while waiting for the import
            try:
                wanted.switch.apply(wanted.settings)
            except PatchRefused as error:
                wanted.refusal = error
                others = [s for s in self._switches.values() if s.owner == wanted.owner and s.refusal is None]
                if wanted.named and not (isinstance(error, NotInThisVersion) and others):
                    for other in others:
                        other.switch.revert()
                        other.refusal = PatchRefused(f"reverted, because {wanted.switch.name} was refused")
                    raise
                if str(error) not in self._warned:
                    self._warned.add(str(error))
                    logger.warning("rl-accel: %s stays off: %s", wanted.switch.name, error)

    def status(self) -> Status:
        """Returns the status of all features and switches in this process, read from the frameworks' objects in memory."""
        with self._lock:
            return Status(
                pid=os.getpid(),
                sources=tuple(source for source in _PRECEDENCE if source in (self._sources or {})),
                features=tuple(
                    FeatureStatus(feature.name, self._flags.requested(feature), self._status_of(feature.name))
                    for feature in FEATURES
                ),
                flag_readers=self._status_of(FLAG_READER),
                loggers=self._status_of(METRICS_LOGGER),
            )

    def _status_of(self, owner: str) -> tuple[SwitchStatus, ...]:
        return tuple(wanted.status() for wanted in self._switches.values() if wanted.owner == owner)


def switches_of(*modules: str) -> list[Switch]:
    """Imports the modules named ``modules`` and returns the switches (changes to a framework) in their tuples
    ``SWITCHES``."""
    return [switch for module in modules for switch in importlib.import_module(module).SWITCHES]


def _environment(known: Container[str] = ()) -> dict[str, dict[str, Any]]:
    """Returns the flags in the environment variables ``RL_ACCEL`` and ``RL_ACCEL_CONFIG``, by source.

    Leaves out empty variables, and sources in ``known``, which another process has read and passed on.
    """
    readers: dict[str, Callable[[], dict[str, Any]]] = {NAMES: cfg.read_names, ENVIRONMENT: cfg.read_environment}
    return {source: flags for source, read in readers.items() if source not in known and (flags := read())}


def _received(payload: str) -> FlagSources:
    """Returns the flags in ``payload``, the JSON text from the driver process, by source.

    Raises ConfigError if ``payload`` is damaged, or comes from another version of rl-accel.
    """
    try:
        sources: FlagSources = json.loads(payload)
        version = __version__ if sources is None else sources.pop(_VERSION, __version__)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{SOURCES_VAR} wants what rl-accel writes there, found {payload!r}: unset it") from error
    if version != __version__:
        raise ConfigError(
            f"the driver of this job has rl-accel {version}, this node {__version__}: all nodes want one version"
        )
    return sources


def _resolve(sources: FlagSources) -> cfg.Flags:
    by_source = sources or {}
    return cfg.resolve([(source, by_source[source]) for source in _PRECEDENCE if source in by_source])


def _has_switches(module: str) -> bool:
    """Returns whether ``module`` is imported, and far enough to have the tuple ``SWITCHES``."""
    return hasattr(sys.modules.get(module), "SWITCHES")


def is_installed(framework: str) -> bool:
    """Returns whether the package ``framework`` can be imported. Does not import it."""
    if sys.modules.get(framework) is not None:  # None: the import is blocked
        return True
    try:
        return importlib.util.find_spec(framework) is not None
    except (ImportError, ValueError):
        return False


RUNTIME = Runtime()
log.set_up()


def enable(*names: str, **features: Any) -> Status:
    """Turns features on in this process and in Ray processes that this program starts later. Returns the status of all features.

    - ``enable()`` turns on all lossless features. A lossless feature that cannot work here stays off with a warning.
    - ``enable("gae")``, ``enable(gae=True)`` and ``enable(gae=dict(backend="numba"))`` turn on the named feature.
    - ``auto=True`` adds the lossless features. ``gae=False`` turns a feature off.

    A second call replaces the arguments of the first call. Features that the environment or the framework's configuration turns on
    stay on.

    Args:
        names: names of features to turn on with their default flags.
        features: flags by feature name.

    Raises:
        ConfigError: an argument is unknown, has the wrong type or is out of range.
        PatchRefused: a feature enabled by name cannot be applied. All changes of this call are undone.
    """
    for name in names:
        if not isinstance(name, str):
            found = f"{name!r} ({type(name).__name__})"
            raise ConfigError(f"{KEYWORDS} wants names of features or name=flags, found {found}")
        if name in features:
            raise ConfigError(f"{KEYWORDS}: {name} is there twice, as a name and as {name}={features[name]!r}")
    flags: dict[str, Any] = dict.fromkeys(names, True) if names or features else {"auto": True}
    for name, value in features.items():
        flags[name] = {"enable": True, **value} if isinstance(value, Mapping) else value
    _require_engines(_resolve({KEYWORDS: cfg.as_mapping(flags, KEYWORDS)}))
    RUNTIME.set_source(KEYWORDS, flags)
    return RUNTIME.status()


def _require_engines(flags: cfg.Flags) -> None:
    """Raises PatchRefused if ``flags`` ask by name for a feature whose only rollout engine is not installed."""
    for feature in FEATURES:
        frameworks = [framework for framework in feature.switches if is_installed(framework)]
        is_needed = feature.engine and frameworks == ["verl"] and flags.requested(feature) == "by name"
        if is_needed and not is_installed(feature.engine):
            raise PatchRefused(f"{feature.name} was asked for, but {feature.engine} is not installed here")


def disable() -> Status:
    """Turns all features off in this process and in Ray processes that are started later. Returns the status of all features.

    Restores every original object. Features stay off until :func:`enable` is called, even if the environment or the framework's
    configuration turns them on.

    Raises:
        PatchRefused: other code has wrapped a function that rl-accel had patched, so that the original cannot be restored.
    """
    RUNTIME.restore(None)
    return RUNTIME.status()


def status() -> Status:
    """Returns the status of all features and switches in this process. ``print(rl_accel.status())`` prints it as a table."""
    return RUNTIME.status()


@contextmanager
def enabled(*names: str, **features: Any) -> Iterator[Status]:
    """Turns features on inside the block ``with rl_accel.enabled("gae"):``. The arguments are those of :func:`enable`."""
    before = RUNTIME.sources()
    try:
        yield enable(*names, **features)
    finally:
        RUNTIME.restore(before)
