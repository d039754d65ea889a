"""Plots of an A/B report: curves of reward and validation, and seconds of each step."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_accel.lab.ab.convergence import AXES

_ARM_COLOURS = ("#8d99ae", "#1d6fd1", "#e07a1f", "#2a9d5c", "#b5498f", "#7a5c3e")


def write_plots(summary: dict[str, Any], out: Path) -> list[Path]:
    """Writes the plots of an A/B as PNG files into the folder ``out``. Returns their paths.

    ``summary`` is the content of ``summary.json``. A plot without data is skipped.
    """
    written = []
    for name, make in {"reward.png": _reward, "step_time.png": _step_time}.items():
        (out / name).unlink(missing_ok=True)
        figure = make(summary)
        if figure is not None:
            lines = figure.axes[0].get_legend_handles_labels()
            figure.legend(*lines, loc="outside upper center", ncols=6, frameon=False, fontsize=8)
            figure.savefig(out / name, dpi=130, facecolor="white")
            written.append(out / name)
    return written


def _figure(height: float = 3.6, columns: int = 1, rows: int = 1, **options: Any) -> tuple[Any, Any]:
    """Returns a matplotlib figure and the 2-D array of its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, height), layout="constrained")
    all_axes = figure.subplots(rows, columns, squeeze=False, **options)
    for axes in all_axes.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=3)
        axes.grid(alpha=0.25)
        axes.title.set_fontsize(10)
    return figure, all_axes


def _arms(summary: dict[str, Any]) -> dict[str, str]:
    """Returns the colour of each arm that has runs, the baseline first."""
    present = {run["arm"] for run in summary["runs"]}
    baseline = summary["recipe"]["baseline"]
    arms = [arm for arm in sorted(summary["recipe"]["arms"], key=lambda arm: arm != baseline) if arm in present]
    return {arm: _ARM_COLOURS[index % len(_ARM_COLOURS)] for index, arm in enumerate(arms)}


def _reward(summary: dict[str, Any]) -> Any:
    """Plots reward and validation metrics of all runs: a row of plots per metric, a column per x axis (see ``AXES``)."""
    curves = {name: by_axis for name, by_axis in summary["convergence"]["curves"].items() if any(by_axis.values())}
    known = [axis for axis in AXES if any(by_axis.get(axis) for by_axis in curves.values())]
    if not known:
        return None
    coincide = any(pair["steps_compared"] and pair["parts_at"] is None for pair in summary["differences"])
    figure, all_axes = _figure(0.4 + 2.9 * len(curves), len(known), len(curves), sharey="row", sharex="col")
    for (metric, by_axis), row in zip(curves.items(), all_axes, strict=True):
        for axis, axes in zip(known, row, strict=True):
            # a broad, pale baseline stays visible below a coinciding curve
            _draw_runs(axes, summary, by_axis[axis], {"lw": 5, "alpha": 0.4} if coincide else {})
            axes.locator_params(axis="x", nbins=4)
        over = "; curves that coincide are drawn over each other" if coincide else ""
        row[0].set_title(metric + over, fontsize=10, loc="left")
    for axis, axes in zip(known, all_axes[-1], strict=True):
        axes.set_xlabel(AXES[axis])
    return figure


def _draw_runs(axes: Any, summary: dict[str, Any], curves: Mapping[str, Any], base_style: dict[str, Any]) -> None:
    """Draws ``curves`` (run -> x and y values) in the colours of the arms. ``base_style``: line options for the baseline's runs."""
    for index, (arm, colour) in enumerate(_arms(summary).items()):
        names = [run["name"] for run in summary["runs"] if run["arm"] == arm and run["name"] in curves]
        for seed, name in enumerate(names):
            style = {"lw": 1.5} | (base_style if index == 0 else {})
            axes.plot(*curves[name], color=colour, label=None if seed else arm, **style)


def _step_time(summary: dict[str, Any]) -> Any:
    names = summary["recipe"]["metrics"]
    steps = summary["curves"].get(names["stage_prefix"] + names["step"], {})
    figure, ((axes,),) = _figure()
    _draw_runs(axes, summary, {name: curve.values() for name, curve in steps.items() if curve["steps"]}, {})
    seconds = [value for line in axes.lines for value in line.get_ydata() if math.isfinite(value)]
    if not seconds:
        return None
    axes.set(title="Seconds a step", xlabel="training step", ylabel="seconds", ylim=(0, 1.12 * max(seconds)))
    axes.xaxis.get_major_locator().set_params(integer=True)
    first = max((ends[0] for ends in summary["measured_steps"].values() if ends), default=1)
    if first > 1:
        limits = axes.get_xlim()
        axes.axvspan(limits[0], first - 0.5, color="#000000", alpha=0.06, lw=0, label="warm-up, not counted")
        axes.set_xlim(limits)
    return figure
