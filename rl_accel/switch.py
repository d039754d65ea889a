"""What goes on and off with a feature (a patch, an entry in a registry, a check of a framework), and what is said about it."""

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from rl_accel import __version__

forget_when_off: list[Callable[[], object]] = []
"""Calls that clear what a feature remembers in a module's globals. They are made when the last feature has been turned off."""


class SwitchState(enum.Enum):
    """What the live objects say. FOREIGN: it was on, then someone wrapped or replaced ours."""

    PENDING = "waiting"
    APPLIED = "applied"
    FOREIGN = "foreign"


class Switch(Protocol):
    """One thing that a feature changes in a framework, listed in a module's ``SWITCHES``."""

    @property
    def name(self) -> str:
        """Unique: ``"verl.gae"``."""

    @property
    def target(self) -> str:
        """``"pkg.mod:what"``; it can be applied once ``pkg.mod`` has been imported."""

    def state(self) -> SwitchState:
        """Return the state as the live objects show it. Imports nothing."""

    def apply(self, settings: Any) -> None:
        """Switch on, or raise PatchRefused and leave everything as it was. Idempotent. ``settings``: the feature's flags."""

    def revert(self) -> None:
        """Put back the very objects that were there. Raises PatchRefused if someone has wrapped ours since."""


@dataclass(frozen=True)
class SwitchStatus:
    """One switch. ``state``: applied, waiting (its module is not imported yet), refused, foreign (wrapped by others),
    unsupported (not for this version of the framework; the others of its feature go on)."""

    name: str
    target: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class FeatureStatus:
    """One feature. ``requested``: ``by name``, ``automatically`` or ``off``."""

    name: str
    requested: str
    patches: tuple[SwitchStatus, ...]

    @property
    def applied(self) -> bool:
        """Whether at least one switch of the feature is in force and none is refused or overlaid by someone else."""
        states = {patch.state for patch in self.patches}
        return "applied" in states and not states & {"refused", "foreign"}


@dataclass(frozen=True)
class Status:
    """What is on in one process.

    Attributes:
        pid: of the process.
        sources: where its flags come from, weakest first.
        features: every feature of the pack.
        flag_readers: what reads flags from a framework's configuration; armed by the plug-in, without any flag.
        loggers: what adds our numbers to a framework's log; armed while a feature is on.
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
        """Return nested plain dicts and lists, ready for JSON."""
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
    """Return a line for each of ``rows``, with columns as wide as their widest cell; the last one is never cut."""
    table = [tuple(row) for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table)
    return [" " * indent + line.rstrip() for line in lines]
