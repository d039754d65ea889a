"""The pictures of a report: reward curves, stage times, step time over steps; those about rollouts are in rollout_plots."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_accel.lab.ab import rollout_plots
from rl_accel.lab.ab.extra import needs
from rl_accel.lab.ab.stats import OTHER

_ARM_COLOURS = ("#8d99ae", "#1d6fd1", "#e07a1f", "#2a9d5c", "#b5498f", "#7a5c3e")
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
_FURTHER_COLOURS = ("#8c6d46", "#3d5a80", "#c08497", "#a3b18a", "#577590")


def draw(summary: dict[str, Any], out: Path) -> list[Path]:
    """Write the pictures of a summary into ``out``: reward, stages, step time, those about rollouts; skip those without data."""
    pictures = {"reward.png": _reward, "stages.png": _stages, "step_time.png": _step_time}
    written = []
    for name, make in pictures.items():
        (out / name).unlink(missing_ok=True)
        figure = make(summary)
        if figure is not None:
            figure.savefig(out / name, dpi=130, facecolor="white")
            written.append(out / name)
    return written + _draw_rollout(summary, out)


def _draw_rollout(summary: dict[str, Any], out: Path) -> list[Path]:
    """Write the pictures about rollouts, if the summary has that part."""
    pictures = {
        "rollout_seconds.png": rollout_plots.seconds,
        "queue.png": rollout_plots.queue,
        "lengths.png": rollout_plots.lengths,
        "reward_progress.png": rollout_plots.reward,
    }
    colours = {arm: _ARM_COLOURS[index % len(_ARM_COLOURS)] for index, arm in enumerate(_arms(summary))}
    written = []
    for name, make in pictures.items():
        (out / name).unlink(missing_ok=True)
        figure = needs("matplotlib.figure").Figure(figsize=(7.2, 3.6), layout="constrained")
        if summary["rollout"] and make(figure, summary, colours):
            for axes in figure.axes:
                axes.spines[["top", "right"]].set_visible(False)
                axes.grid(alpha=0.25)
            _legend(figure)
            figure.savefig(out / name, dpi=130, facecolor="white")
            written.append(out / name)
    return written


def _figure(width: float, height: float) -> tuple[Any, Any]:
    needs("matplotlib")
    figure = needs("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=3)
    return figure, axes


def _reward(summary: dict[str, Any]) -> Any:
    metric = summary["recipe"]["metrics"]["reward"]
    title = f"Reward ({metric})"
    if any(v["steps_compared"] and v["parts_at"] is None for v in summary["reward_verdicts"]):
        title += "; curves that coincide are drawn over each other"
    # the baseline is broad and pale so that a curve that coincides with it stays visible
    figure = _curves(summary, metric, title, "reward", {"lw": 5, "alpha": 0.6})
    if figure is not None:
        _legend(figure)
    return figure


def _step_time(summary: dict[str, Any]) -> Any:
    names = summary["recipe"]["metrics"]
    figure = _curves(summary, names["stage_prefix"] + names["step"], "Seconds a step", "seconds", {"lw": 1.5})
    if figure is None:
        return None
    axes = figure.axes[0]
    axes.set_ylim(0, 1.12 * max(max(line.get_ydata()) for line in axes.lines))
    first = max((ends[0] for ends in summary["measured_steps"].values() if ends), default=1)
    if first > 1:
        left, right = axes.get_xlim()
        axes.axvspan(left, first - 0.5, color="#000000", alpha=0.06, lw=0, label="warm-up, not counted")
        axes.set_xlim(left, right)
    _legend(figure)
    return figure


def _curves(summary: dict[str, Any], metric: str, title: str, label: str, base_style: dict[str, Any]) -> Any:
    curves = {name: points for name, points in summary["curves"].get(metric, {}).items() if points["steps"]}
    if not curves:
        return None
    figure, axes = _figure(7.2, 3.6)
    for index, arm in enumerate(_arms(summary)):
        colour, labelled = _ARM_COLOURS[index % len(_ARM_COLOURS)], False
        for run in summary["runs"]:
            if run["arm"] != arm or run["name"] not in curves:
                continue
            points = curves[run["name"]]
            style = base_style if index == 0 else {"lw": 1.5, "marker": "o", "ms": 3}
            legend = None if labelled else arm
            axes.plot(points["steps"], points["values"], color=colour, label=legend, **style)
            labelled = True
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("training step")
    axes.set_ylabel(label)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", alpha=0.25)
    return figure


def _stages(summary: dict[str, Any]) -> Any:
    whole = summary["recipe"]["metrics"]["step"]
    rows = [row for row in summary["stages"] if row["stage"] != whole]
    total: dict[str, Any] = next((row["arms"] for row in summary["stages"] if row["stage"] == whole), {})
    arms = [arm for arm in _arms(summary) if arm in total]
    if not arms:
        return None
    figure, axes = _figure(7.2, 1.7 + 0.55 * len(arms))
    longest = max(total[arm]["mean"] for arm in arms)
    left = dict.fromkeys(arms, 0.0)
    for index, row in enumerate(rows):
        widths = [max(0.0, row["arms"].get(arm, {}).get("mean", 0.0)) for arm in arms]
        if max(widths) < 0.002 * longest:
            continue
        colour = STAGE_COLOURS.get(row["stage"], _FURTHER_COLOURS[index % len(_FURTHER_COLOURS)])
        axes.barh(
            arms, widths, left=[left[a] for a in arms], color=colour, label=row["stage"], edgecolor="white", lw=0.5
        )
        for arm, width in zip(arms, widths, strict=True):
            if width > 0.09 * longest:
                axes.text(left[arm] + width / 2, arm, f"{width:.2f}", ha="center", va="center", fontsize=8)
            left[arm] += width
    for arm in arms:
        axes.text(
            left[arm] + 0.01 * longest, arm, f"{total[arm]['mean']:.2f} s", va="center", fontweight="bold", fontsize=9
        )
    axes.set_xlim(0, longest * 1.12)
    axes.invert_yaxis()
    axes.set_xlabel("mean seconds a step, by stage")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    _legend(figure)
    return figure


def _legend(figure: Any) -> None:
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=6, frameon=False, fontsize=8)


def _arms(summary: dict[str, Any]) -> Sequence[str]:
    """The arms with runs, the baseline first."""
    present = {run["arm"] for run in summary["runs"]}
    baseline = summary["recipe"]["baseline"]
    return [arm for arm in sorted(summary["recipe"]["arms"], key=lambda arm: arm != baseline) if arm in present]
