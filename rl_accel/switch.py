"""Switches and their status. A switch is one reversible change to a framework: a patch, a registry entry or a check."""

import enum
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from rl_accel import __version__
from rl_accel.console import aligned

forget_when_off: list[Callable[[], object]] = []
"""Functions to call when the last enabled feature has been turned off. Each clears state that a module keeps globally."""


class SwitchState(enum.Enum):
    """State of a switch (one reversible change to a framework), read from the framework's objects in memory.

    WAITING: not applied, for example because the framework's module is not imported yet.
    APPLIED: in force.
    FOREIGN: other code has wrapped or replaced our object, or has taken the name under which we register it.
    """

    WAITING = "waiting"
    APPLIED = "applied"
    FOREIGN = "foreign"


class Switch(Protocol):
    """One reversible change that a feature makes to a framework. Modules list their switches in the tuple ``SWITCHES``."""

    @property
    def name(self) -> str:
        """Unique name of the switch, such as ``"verl.gae"``."""

    @property
    def target(self) -> str:
        """Location of the change, as ``"pkg.mod:name"``. The switch can be applied once the module ``pkg.mod`` is imported."""

    def state(self) -> SwitchState:
        """Returns the state of the switch, read from the framework's objects in memory. Imports nothing."""

    def apply(self, settings: Any) -> None:
        """Applies the switch with the feature's flags ``settings``. A second call does nothing.

        Raises PatchRefused if the switch cannot be applied; nothing is changed then."""

    def revert(self) -> None:
        """Undoes the change by putting the original objects back. Raises PatchRefused if other code has wrapped our object."""


@dataclass(frozen=True)
class SwitchStatus:
    """Status of one switch (a reversible change to a framework). ``state`` is one of: applied, waiting (the target's module is not
    imported yet), refused, foreign (other code has wrapped our object), unsupported (the switch does not fit this framework
    version; the feature's other switches stay on)."""

    name: str
    target: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class FeatureStatus:
    """Status of one feature. ``requested`` says how the feature was enabled: ``by name``, ``automatically`` or ``off``."""

    name: str
    requested: str
    switches: tuple[SwitchStatus, ...]

    @property
    def applied(self) -> bool:
        """True if at least one switch of the feature is applied, and no switch of the feature is refused or foreign."""
        states = {switch.state for switch in self.switches}
        return "applied" in states and not states & {"refused", "foreign"}


@dataclass(frozen=True)
class Status:
    """Status of rl-accel in one process. A switch is one reversible change to a framework.

    Attributes:
        pid: ID of the process.
        sources: names of the sources that set flags; a later source overrides the earlier ones.
        features: status of every feature of rl-accel.
        flag_readers: status of switches that read flags from a framework's configuration; on in verl even without flags.
        loggers: status of switches that add our metrics to a framework's log while any feature is on.
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
        """Returns the status as nested dicts and lists that ``json.dumps`` accepts."""
        return {"version": __version__, **asdict(self)}

    def __str__(self) -> str:
        head = f"rl-accel {__version__}, process {self.pid}; flags from: {', '.join(self.sources) or 'nowhere'}"
        others = (("reads flags", self.flag_readers), ("logs numbers", self.loggers))
        rows = []
        for name, requested, switches in (
            *((feature.name, feature.requested, feature.switches) for feature in self.features),
            *((name, "", switches) for name, switches in others if switches),
        ):
            rows.append((name, requested, "", ""))
            rows += [("", s.state, s.name, f"{s.target} ({s.reason})" if s.reason else s.target) for s in switches]
        return "\n".join([head, *aligned(rows, indent=2)])
