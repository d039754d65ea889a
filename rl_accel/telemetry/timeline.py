"""The picture of a profile: mean stages of a step, the parts of its generation, and the responses of its last step in time."""

from pathlib import Path
from typing import Any

from rl_accel.lab.ab.extra import needs
from rl_accel.lab.ab.plots import STAGE_COLOURS
from rl_accel.telemetry.profile import Profile
from rl_accel.telemetry.responses import CANCELLED, COMPLETED

PARTS = {
    "most": ("nine in ten responses", "#4878a8"),
    "waiting": ("waiting for the longest", "#b5498f"),
    "reward": ("rewards", "#9bc0de"),
    "rest": ("noticing, storing", "#b7b7a4"),
}
_PLAIN = "#8d99ae"
_OUTCOMES = {COMPLETED: "#4878a8", CANCELLED: "#e8a24c"}
_FAILED = "#d1495b"
_REWARD = "#2a9d5c"
_MOST_ROWS = 2000


def draw(found: Profile, path: Path) -> None:
    """Write the picture of ``found`` to ``path``."""
    needs("matplotlib")
    known = bool(found.generations)
    responses = sorted(found.last.responses, key=lambda r: (r.ended, r.began)) if found.last and known else []
    figure = needs("matplotlib.figure").Figure(figsize=(8, 5.6 if responses else 1.9), layout="constrained")
    heights = [1.1, 3] if responses else [1]
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part in axes:
        part.spines[["top", "right"]].set_visible(False)
    _bars(axes[0], found, known)
    if responses:
        _responses(axes[1], found, responses)
    figure.savefig(path, dpi=120, facecolor="white")


def _bars(axes: Any, found: Profile, known: bool) -> None:
    """Stages of a mean step, one after the other, and below them what generation was."""
    rows = ["step", "generation"] if known else ["step"]
    _stack(
        axes, "step", [(name, value, STAGE_COLOURS.get(name, _PLAIN)) for name, value in found.stages.items()], found
    )
    if known:
        parts = [(label, found.mean(name) or 0.0, colour) for name, (label, colour) in PARTS.items()]
        _stack(axes, "generation", parts, found)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlim(0, found.step_seconds * 1.01)
    idle = found.mean("idle")
    title = f"Mean of steps {found.steps[0]}-{found.steps[-1]}: {found.step_seconds:.2f} s"
    axes.set_title(title + (f", generation {idle:.0%} idle" if idle is not None else ""), fontsize=10)
    axes.set_xlabel("seconds")
    axes.tick_params(axis="y", length=0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1.1))


def _stack(axes: Any, row: str, parts: list[tuple[str, float, str]], found: Profile) -> None:
    place = 0 if row == "step" else 1
    left = 0.0
    for label, seconds, colour in parts:
        axes.barh(place, seconds, left=left, height=0.7, color=colour, edgecolor="white", lw=0.5)
        # What has no room for its name (a character takes a little more than a hundredth of the width) goes into the legend.
        if seconds > 0.015 * len(label) * found.step_seconds:
            axes.text(left + seconds / 2, place, label, ha="center", va="center", fontsize=8)
        elif seconds > 0.003 * found.step_seconds:
            axes.barh(place, 0, color=colour, label=label)
        left += max(seconds, 0.0)


def _responses(axes: Any, found: Profile, responses: list[Any]) -> None:
    """A line a response: generation, then reward. Of very many, evenly chosen ones."""
    assert found.last is not None
    shown = responses[:: len(responses) // _MOST_ROWS + 1]
    start = min(response.began for response in responses)
    for place, response in enumerate(shown):
        end = response.ended if response.generated is None else response.generated
        colour = _OUTCOMES.get(response.outcome, _FAILED)
        axes.plot([response.began - start, end - start], [place, place], color=colour, lw=1.2, solid_capstyle="butt")
        if response.rewarded is not None:
            axes.plot([end - start, response.rewarded - start], [place, place], color=_REWARD, lw=1.2)
    for label, colour in (
        ("completed", _OUTCOMES[COMPLETED]),
        ("cancelled", _OUTCOMES[CANCELLED]),
        ("reward", _REWARD),
    ):
        axes.plot([], [], color=colour, label=label)
    seconds = found.last.stages["gen"]
    axes.axvline(seconds, color="black", lw=0.8, ls=":", label="end of the stage")
    axes.set_xlim(0, seconds * 1.01)
    axes.set_title(f"Responses of step {found.last.step}, in the order in which they ended", fontsize=10)
    axes.set_xlabel("seconds since the first response began")
    axes.set_ylabel("responses")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
