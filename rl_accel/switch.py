"""Switches and their status. A switch is one reversible change to a framework: a patch, a registry entry or a check."""

import enum
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rl_accel import __version__
from rl_accel.console import aligned

forget_when_off: list[Callable[[], object]] = []
"""Functions to call when the last enabled feature is turned off. Each clears what a module has collected in global variables."""


class SwitchState(enum.Enum):
    """State of a switch (a reversible change to a framework), read from the framework's objects in memory.

    WAITING: not applied, for example because the framework's module is not imported yet.
    APPLIED: in force.
    FOREIGN: other code has wrapped or replaced rl-accel's object, or uses the name under which rl-accel registers it.
    """

    WAITING = "waiting"
    APPLIED = "applied"
    FOREIGN = "foreign"


@dataclass(frozen=True)
class Switch:
    """A reversible change that a feature makes to a framework. A module lists its switches in the tuple ``SWITCHES``.

    Attributes:
        name: unique name of the switch, such as ``"verl.gae"``.
        target: place of the change, as ``"pkg.mod:name"``. The switch is applied when the module ``pkg.mod`` has been imported.
    """

    name: str
    target: str

    @property
    def module(self) -> str:
        """Name of the module whose import makes the change possible."""
        return self.target.partition(":")[0]

    def state(self) -> SwitchState:
        """Returns the state of the switch, read from the framework's objects in memory. Imports nothing."""
        raise NotImplementedError

    def apply(self, settings: Any) -> None:
        """Applies the switch with the feature's flags ``settings``. A second call does nothing, even with other settings.

        Raises PatchRefused if the switch cannot be applied. Nothing is changed then.
        """
        raise NotImplementedError

    def revert(self) -> None:
        """Undoes the change. Raises PatchRefused if other code has wrapped the object that rl-accel put in place."""
        raise NotImplementedError


@dataclass(frozen=True)
class SwitchStatus:
    """Status of one switch (a reversible change to a framework).

    ``state`` is a value of :class:`SwitchState`, or ``refused``: the switch cannot be applied, ``reason`` says why; or
    ``unsupported``: it does not fit this framework version, and the feature's other switches stay on.
    """

    name: str
    target: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class FeatureStatus:
    """Status of one feature. ``requested`` is ``by name``, ``automatically`` or ``off``: how the feature was turned on."""

    name: str
    requested: str
    switches: tuple[SwitchStatus, ...]

    @property
    def applied(self) -> bool:
        """True if a switch of the feature is applied, and none is refused or changed by other code (foreign)."""
        states = {switch.state for switch in self.switches}
        return "applied" in states and not states & {"refused", "foreign"}


@dataclass(frozen=True)
class Status:
    """Status of rl-accel in one process.

    Attributes:
        pid: ID of the process.
        sources: names of the sources that set flags; a later source overrides the earlier ones.
        features: status of every feature.
        flag_readers: status of the switches that read flags from a framework's configuration.
        loggers: status of the switches that add rl-accel's metrics to a framework's log.
    """

    pid: int
    sources: tuple[str, ...]
    features: tuple[FeatureStatus, ...]
    flag_readers: tuple[SwitchStatus, ...] = ()
    loggers: tuple[SwitchStatus, ...] = ()

    def __getitem__(self, feature: str) -> FeatureStatus:
        for item in self.features:
            if item.name == feature:
                return item
        raise KeyError(feature)

    def to_dict(self) -> dict[str, Any]:
        """Returns the status as dicts and lists for ``json.dumps``."""
        return {"version": __version__, **asdict(self)}

    def __str__(self) -> str:
        head = f"rl-accel {__version__}, process {self.pid}; flags from: {', '.join(self.sources) or 'nowhere'}"
        others = (("reads flags", self.flag_readers), ("logs numbers", self.loggers))
        rows = []
        for item in (*self.features, *(FeatureStatus(name, "", switches) for name, switches in others if switches)):
            rows.append((item.name, item.requested, "", ""))
            rows += [("", s.state, s.name, f"{s.target} ({s.reason})" if s.reason else s.target) for s in item.switches]
        return "\n".join([head, *aligned(rows, indent=2)])
