"""Switches and their status. A switch is one reversible change of a feature: a patch, a registry entry or a check."""

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from rl_accel import __version__

forget_when_off: list[Callable[[], object]] = []
"""Functions that clear the state of features in module globals. Called after the last feature has been turned off."""


class SwitchState(enum.Enum):
    """State of a switch, read from the live objects. FOREIGN: someone else has wrapped our object or holds its place."""

    PENDING = "waiting"
    APPLIED = "applied"
    FOREIGN = "foreign"


class Switch(Protocol):
    """One change that a feature makes to a framework, listed in a module's ``SWITCHES``."""

    @property
    def name(self) -> str:
        """Unique name, such as ``"verl.gae"``."""

    @property
    def target(self) -> str:
        """Target, ``"pkg.mod:what"``. The switch can be applied once ``pkg.mod`` has been imported."""

    def state(self) -> SwitchState:
        """Returns the state, read from the live objects. Imports nothing."""

    def apply(self, settings: Any) -> None:
        """Applies the switch, or raises PatchRefused and changes nothing. Idempotent. ``settings``: the feature's flags."""

    def revert(self) -> None:
        """Restores the identical original objects. Raises PatchRefused if someone has wrapped our object since."""


@dataclass(frozen=True)
class SwitchStatus:
    """Status of one switch. ``state``: applied, waiting (the module is not imported yet), refused, foreign (wrapped by others)
    or unsupported (does not fit this framework version; the feature's other switches stay on)."""

    name: str
    target: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class FeatureStatus:
    """Status of one feature. ``requested``: ``by name``, ``automatically`` or ``off``."""

    name: str
    requested: str
    patches: tuple[SwitchStatus, ...]

    @property
    def applied(self) -> bool:
        """True if at least one switch of the feature is applied and no switch is refused or foreign."""
        states = {patch.state for patch in self.patches}
        return "applied" in states and not states & {"refused", "foreign"}


@dataclass(frozen=True)
class Status:
    """Status of one process.

    Attributes:
        pid: process ID.
        sources: sources of the flags, weakest first.
        features: status of every feature of the pack.
        flag_readers: switches that read flags from a framework's configuration; enabled by the plug-in without any flag.
        loggers: switches that add our metrics to a framework's log; enabled while any feature is on.
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
        """Returns nested plain dicts and lists, ready for JSON."""
        return {"version": __version__, **asdict(self)}

    def __str__(self) -> str:
        head = f"rl-accel {__version__}, process {self.pid}; flags from: {', '.join(self.sources) or 'nowhere'}"
        others = (("reads flags", self.flag_readers), ("logs numbers", self.loggers))
        rows = []
        for name, requested, switches in (
            *((feature.name, feature.requested, feature.patches) for feature in self.features),
            *((name, "", switches) for name, switches in others if switches),
        ):
            rows.append((name, requested, "", ""))
            rows += [("", s.state, s.name, f"{s.target} ({s.reason})" if s.reason else s.target) for s in switches]
        return "\n".join([head, *aligned(rows, indent=2)])


def aligned(rows: Iterable[Sequence[str]], indent: int = 0) -> list[str]:
    """Returns one text line per row; each column is as wide as its widest cell."""
    table = [tuple(row) for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table)
    return [" " * indent + line.rstrip() for line in lines]
