"""The answer of :func:`rl_accel.status`: plain data that prints as a table and turns into JSON."""

from dataclasses import asdict, dataclass
from typing import Any

from rl_accel import __version__


@dataclass(frozen=True)
class PatchStatus:
    """One patch. ``state``: applied, waiting (its module is not imported yet), refused, foreign (wrapped by others)."""

    name: str
    target: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class FeatureStatus:
    """One feature. ``requested``: ``by name``, ``automatically`` or ``off``."""

    name: str
    requested: str
    patches: tuple[PatchStatus, ...]

    @property
    def applied(self) -> bool:
        """Whether at least one patch of the feature is in force and none is refused or overlaid by someone else."""
        states = {patch.state for patch in self.patches}
        return "applied" in states and not states & {"refused", "foreign"}


@dataclass(frozen=True)
class Status:
    """What is on in one process."""

    pid: int
    sources: tuple[str, ...]
    features: tuple[FeatureStatus, ...]

    def __getitem__(self, feature: str) -> FeatureStatus:
        for item in self.features:
            if item.name == feature:
                return item
        raise KeyError(feature)

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain dicts and lists, ready for JSON."""
        return {"version": __version__, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"rl-accel {__version__}, process {self.pid}; flags from: {', '.join(self.sources) or 'nowhere'}"]
        for feature in self.features:
            lines.append(f"  {feature.name:<12} {feature.requested}")
            for patch in feature.patches:
                reason = f" ({patch.reason})" if patch.reason else ""
                lines.append(f"    {patch.state:<9} {patch.name:<34} {patch.target}{reason}")
        return "\n".join(lines)
