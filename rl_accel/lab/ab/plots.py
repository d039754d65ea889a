"""Plot of an A/B report: curves of reward and validation."""

from pathlib import Path
from typing import Any

from rl_accel.lab.ab.convergence import AXES

_ARM_COLOURS = ("#8d99ae", "#1d6fd1", "#e07a1f", "#2a9d5c", "#b5498f", "#7a5c3e")


def write_plots(summary: dict[str, Any], out: Path) -> list[Path]:
    """Writes the plot of an A/B as ``reward.png`` into the folder ``out``. Returns its path; nothing if there are no data.

    ``summary`` is the content of ``summary.json``. The figure has a row of plots per metric, and a column per x axis (``AXES``).
    """
    from matplotlib.figure import Figure

    path = out / "reward.png"
    path.unlink(missing_ok=True)
    curves = {name: by_axis for name, by_axis in summary["convergence"]["curves"].items() if any(by_axis.values())}
    known = [axis for axis in AXES if any(by_axis.get(axis) for by_axis in curves.values())]
    if not known:
        return []
    coincide = any(pair["steps_compared"] and pair["parts_at"] is None for pair in summary["differences"])
    figure = Figure(figsize=(7.2, 0.4 + 2.9 * len(curves)), layout="constrained")
    all_axes = figure.subplots(len(curves), len(known), squeeze=False, sharey="row", sharex="col")
    for (metric, by_axis), row in zip(curves.items(), all_axes, strict=True):
        for axis, axes in zip(known, row, strict=True):
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(length=3)
            axes.grid(alpha=0.25)
            axes.locator_params(axis="x", nbins=4)
            _draw_runs(axes, summary, by_axis[axis], coincide)
        over = "; curves that coincide are drawn over each other" if coincide else ""
        row[0].set_title(metric + over, fontsize=10, loc="left")
    for axis, axes in zip(known, all_axes[-1], strict=True):
        axes.set_xlabel(AXES[axis])
    lines = figure.axes[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside upper center", ncols=6, frameon=False, fontsize=8)
    figure.savefig(path, dpi=130, facecolor="white")
    return [path]


def _draw_runs(axes: Any, summary: dict[str, Any], curves: dict[str, Any], coincide: bool) -> None:
    """Draws ``curves`` (run -> x and y values) in the colours of the arms, the baseline first."""
    present = {run["arm"] for run in summary["runs"]}
    baseline = summary["recipe"]["baseline"]
    arms = [arm for arm in sorted(summary["recipe"]["arms"], key=lambda arm: arm != baseline) if arm in present]
    for index, arm in enumerate(arms):
        names = [run["name"] for run in summary["runs"] if run["arm"] == arm and run["name"] in curves]
        # a broad, pale baseline stays visible below a coinciding curve
        style = {"lw": 5, "alpha": 0.4} if coincide and index == 0 else {"lw": 1.5}
        colour = _ARM_COLOURS[index % len(_ARM_COLOURS)]
        for seed, name in enumerate(names):
            axes.plot(*curves[name], color=colour, label=None if seed else arm, **style)
