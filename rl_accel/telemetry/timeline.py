"""The picture of a profile: mean stages of a step, the parts of its generation, and the responses of its last step in time."""

from pathlib import Path
from typing import Any

from rl_accel.telemetry.profile import Profile
from rl_accel.telemetry.stage_clock import CANCELLED, COMPLETED, OTHER

STAGE_COLOURS = {
    "gen": "#4878a8",
    "reward": "#9bc0de",
    "old_log_prob": "#e8a24c",
    "ref": "#f4d29b",
    "values": "#6fb07f",
    "adv": "#d1495b",
    "update_critic": "#9d84b7",
    "update_actor": "#c9b8dd",
    "update_weights": "#5fb3b3",
    "save_checkpoint": "#b7b7a4",
    OTHER: "#d9d9d9",
}

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


def draw(profile: Profile, path: Path) -> None:
    """Write the picture of ``profile`` to ``path``."""
    from matplotlib.figure import Figure

    known = bool(profile.generations)
    responses = sorted(profile.last.responses, key=lambda r: (r.ended, r.began)) if profile.last and known else []
    figure = Figure(figsize=(8, 5.6 if responses else 1.9), layout="constrained")
    heights = [1.1, 3] if responses else [1]
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part in axes:
        part.spines[["top", "right"]].set_visible(False)
    _bars(axes[0], profile, known)
    if responses:
        _responses(axes[1], profile, responses)
    figure.savefig(path, dpi=120, facecolor="white")


def _bars(axes: Any, profile: Profile, known: bool) -> None:
    """Stages of a mean step, one after the other, and below them what generation was."""
    rows = ["step", "generation"] if known else ["step"]
    _stack(
        axes,
        "step",
        [(name, value, STAGE_COLOURS.get(name, _PLAIN)) for name, value in profile.stages.items()],
        profile,
    )
    if known:
        parts = [(label, profile.mean(name) or 0.0, colour) for name, (label, colour) in PARTS.items()]
        _stack(axes, "generation", parts, profile)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlim(0, profile.step_seconds * 1.01)
    idle = profile.mean("idle")
    title = f"Mean of steps {profile.steps[0]}-{profile.steps[-1]}: {profile.step_seconds:.2f} s"
    axes.set_title(title + (f", generation {idle:.0%} idle" if idle is not None else ""), fontsize=10)
    axes.set_xlabel("seconds")
    axes.tick_params(axis="y", length=0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1.1))


def _stack(axes: Any, row: str, parts: list[tuple[str, float, str]], profile: Profile) -> None:
    place = 0 if row == "step" else 1
    left = 0.0
    for label, seconds, colour in parts:
        axes.barh(place, seconds, left=left, height=0.7, color=colour, edgecolor="white", lw=0.5)
        # What has no room for its name (a character takes a little more than a hundredth of the width) goes into the legend.
        if seconds > 0.015 * len(label) * profile.step_seconds:
            axes.text(left + seconds / 2, place, label, ha="center", va="center", fontsize=8)
        elif seconds > 0.003 * profile.step_seconds:
            axes.barh(place, 0, color=colour, label=label)
        left += max(seconds, 0.0)


def _responses(axes: Any, profile: Profile, responses: list[Any]) -> None:
    """A line a response: generation, then reward. Of very many, evenly chosen ones."""
    assert profile.last is not None
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
    seconds = profile.last.stages["gen"]
    axes.axvline(seconds, color="black", lw=0.8, ls=":", label="end of the stage")
    axes.set_xlim(0, seconds * 1.01)
    axes.set_title(f"Responses of step {profile.last.step}, in the order in which they ended", fontsize=10)
    axes.set_xlabel("seconds since the first response began")
    axes.set_ylabel("responses")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
