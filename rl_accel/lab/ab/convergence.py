"""Tests whether an arm (a variant of a training run) changed learning: compares reward and validation with the baseline arm.

Each run contributes one value, its level: the mean of the last fifth of the metric's values, up to the end of the shortest run.
Autocorrelation within a curve therefore adds no evidence. The difference of two arms is tested from three sides (Goeman, Solari and
Stijnen, Three-sided hypothesis testing, Statistics in Medicine 29, 2010). The test gives one of three answers, with an error
probability of at most 5%:

- **equal within the margin**: two one-sided t tests (Schuirmann, 1987) reject that the difference is the margin or more.
- **different**: t tests reject that the difference is the margin or less.
- **not enough runs**: neither of these two answers holds.

Arms whose curves are the same in every value are **identical**, whatever the number of runs.

A margin that is a share of the baseline's gain (last level minus first level) is that share of the mean gain of its runs.
"""

import itertools
import math
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_accel.lab.ab.recipe import Metrics, parse_margin
from rl_accel.lab.ab.stats import RunData, before_and_after, curve, wall_seconds

Array = npt.NDArray[np.float64]
Curves = Sequence[tuple[Array, Array]]
"""Curves of several runs. Each is a pair of arrays: positions on the x axis, and values of a metric."""

EQUAL = "equal within the margin"
DIFFERENT = "different"
NOT_ENOUGH = "not enough runs"
IDENTICAL = "identical"
ALPHA = 0.05
"""Largest probability of a wrong answer ``EQUAL`` or ``DIFFERENT``."""
MIN_SEEDS = 3
"""Smallest number of runs per arm for an answer. Two runs say almost nothing about noise."""
AXES = {
    "steps": "training steps",
    "prompts": "prompts trained",
    "hours": "hours of training",
    "minutes": "minutes of training",
}
"""Mapping from each x axis of the report's curves to the label of the axis."""
_SECONDS = {"hours": 3600, "minutes": 60}
_VALIDATION = re.compile(r"val-core/.*mean@\d+|val/test_score/.*|eval/[^/]+(?<!ratio)")


def points(run: RunData, names: Metrics, metric: str, unit: str = "hours") -> dict[str, tuple[Array, Array]]:
    """Returns the curve of ``metric`` in a run over each x axis: training steps, prompts trained, and training time in ``unit``.

    A curve is two arrays of equal length: positions, and finite values of the metric. Axes without data are left out.
    """
    steps, values = (np.array(numbers, dtype=float) for numbers in curve(run, metric).values())
    steps = steps[np.isfinite(values)]
    values = values[np.isfinite(values)]
    if not len(values):
        return {}
    timed = run.training_steps(names)
    first = min(timed, default=1)
    positions_by_axis = {"steps": steps}
    if run.batch_size:  # the first step is 1 in verl and 0 in slime
        positions_by_axis["prompts"] = run.batch_size * (steps + (first == 0))
    if timed and first <= 1 and len(timed) == max(timed) - first + 1:
        done = np.cumsum([0.0, *(wall_seconds(metrics, names) for metrics in timed.values())])
        positions_by_axis[unit] = done[np.searchsorted(list(timed), steps, side="right")] / _SECONDS[unit]
    return {axis: (x, values) for axis, x in positions_by_axis.items()}


def decide(base: Array, other: Array, margin: float, paired: bool) -> str:
    """Tests whether two arms are equal or different in a metric. Returns ``EQUAL``, ``DIFFERENT`` or ``NOT_ENOUGH`` (no answer).

    Args:
        base, other: float64 [runs], final metric values of the baseline's runs, and of the other arm's runs.
        margin: largest difference that counts as equal.
        paired: True if ``base`` and ``other`` have the same seeds in the same order (paired t tests instead of Welch's).
    """
    if not margin > 0:
        return NOT_ENOUGH
    low, high = interval(base, other, paired, 1 - 2 * ALPHA)  # within the margin if both one-sided tests reject
    if -margin <= low and high <= margin:
        return EQUAL
    low, high = interval(base, other, paired)
    return DIFFERENT if low >= margin or high <= -margin else NOT_ENOUGH


def interval(base: Array, other: Array, paired: bool, confidence: float = 1 - ALPHA) -> tuple[float, float]:
    """Returns the bounds of the t confidence interval of mean(``other``) - mean(``base``), Welch's unless ``paired``.

    Both bounds are NaN if ``base`` or ``other`` has fewer than 3 runs.
    """
    from scipy.stats import ttest_ind, ttest_rel

    if min(len(base), len(other)) < MIN_SEEDS:
        return math.nan, math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # identical runs have no variance
        test = ttest_rel(other, base) if paired else ttest_ind(other, base, equal_var=False)
        bounds = test.confidence_interval(confidence)
    return float(bounds.low), float(bounds.high)


def matched(base: Sequence[RunData], other: Sequence[RunData]) -> tuple[Sequence[RunData], Sequence[RunData], bool]:
    """Selects the runs of two arms to compare. Returns the runs of each arm, and True if they are paired by seed.

    Runs are paired if all seeds are known and the arms have the same seeds or at least three in common. Runs with other seeds are
    then left out.
    """
    of_base, of_other = ({run.seed: run for run in runs if run.seed is not None} for runs in (base, other))
    shared = sorted(of_base.keys() & of_other.keys())
    known = len(of_base) + len(of_other) == len(base) + len(other)
    if known and len(shared) >= min(MIN_SEEDS, max(len(base), len(other))):
        return [of_base[seed] for seed in shared], [of_other[seed] for seed in shared], True
    return base, other, False


def converge(runs: Sequence[RunData], arms: Sequence[str], baseline: str, names: Metrics) -> dict[str, Any]:
    """Compares reward and validation of each arm with the baseline. Returns the section ``convergence`` of ``summary.json``.

    The section has ``curves{metric: {axis: {run: [x, value]}}}``, ``notes[]`` (sentences for the report) and ``rows[]``. There is a
    row per arm, metric (the reward, then validation) and x axis, with these keys:

    - ``end``, ``last``: last x value of the shortest run, and of the longest run.
    - ``baseline``, ``value``: mean level of the baseline's runs, and of the arm's runs. The level of a run is the mean of the last
      fifth of its values up to ``end``.
    - ``difference``: ``value`` - ``baseline``. ``low``, ``high``: its 95% interval. ``margin``: largest difference that counts as
      equal, in units of the metric.
    - ``answer``: ``IDENTICAL`` or the result of :func:`decide`.
    - ``runs``: number of runs of each of the two arms. ``paired``: whether the runs are paired by seed.
    """
    rows = []
    notes = [note for run in runs for note in run.notes]
    curves = {}
    logged = set().union(*(step for run in runs for step in run.steps.values()))
    seconds = [sum(metrics[names.step_metric] for metrics in run.training_steps(names).values()) for run in runs]
    time = "minutes" if 0 < max(seconds, default=0) < _SECONDS["hours"] else "hours"
    axes = ["steps", "prompts", time]
    for metric in (names.reward, *sorted(filter(_VALIDATION.fullmatch, logged))):
        known = {run.name: points(run, names, metric, time) for run in runs}
        curves[metric] = {
            axis: {name: [part.tolist() for part in run[axis]] for name, run in known.items() if axis in run}
            for axis in axes
        }
        if lacking := [name for name, run in known.items() if not run]:
            notes.append(f"{metric} is not in {listed(lacking, runs)}")
        for arm in (arm for arm in arms if arm != baseline):
            sides = [[run for run in runs if run.arm == name and known[run.name]] for name in (baseline, arm)]
            base, other, paired = matched(*sides)
            if not base or not other:
                continue
            if unpaired := {run.name for side in sides for run in side} - {run.name for run in (*base, *other)}:
                lone = listed(unpaired, runs)
                notes.append(f"{metric} of {arm}: left out for want of a run of the same seed: {lone}")
            for axis in (axis for axis in axes if all(axis in known[run.name] for run in (*base, *other))):
                first, second = ([known[run.name][axis] for run in side] for side in (base, other))
                if row := _row(first, second, paired, names.margin):
                    rows.append({"arm": arm, "metric": metric, "axis": axis, **row})
                elif axis == "steps":
                    notes.append(
                        f"{metric} of {arm} is not compared: a run has fewer than two values until the shortest run ends"
                    )
    per_step = "tell the prompts of a step (compare takes --batch-size)"
    by_axis = curves[names.reward]
    for axis, what in (("prompts", per_step), (time, f"log {names.step_metric} of every step")):
        if lacking := [name for name in by_axis["steps"] if name not in by_axis[axis]]:
            notes.append(f"{AXES[axis]} are not known of {listed(lacking, runs)}, which did not {what}")
    return {"rows": rows, "curves": curves, "notes": notes}


def listed(names: Collection[str], runs: Sequence[RunData]) -> str:
    """Joins names of runs. If all runs of an arm are named, they become "all runs of ARM"."""
    texts = []
    for arm in dict.fromkeys(run.arm for run in runs):
        runs_of_arm = [run.name for run in runs if run.arm == arm]
        chosen = [name for name in runs_of_arm if name in names]
        texts += [f"all runs of {arm}"] if len(chosen) == len(runs_of_arm) > 1 else chosen
    return ", ".join(texts)


def levels(runs: Curves, end: float) -> Array:
    """Returns float64 [2, runs]: for each run, the mean of the first fifth and of the last fifth of its values.

    Only values at positions up to ``end`` on the x axis count. Both means are NaN for a run with fewer than two such values.
    """
    return np.array([before_and_after(y[x <= end]) or (math.nan, math.nan) for x, y in runs]).T


def _row(base: Curves, other: Curves, paired: bool, margin_text: str) -> dict[str, Any] | None:
    ends = [float(x[-1]) for x, _ in (*base, *other)]
    (before, after), (_, value) = (levels(side, min(ends)) for side in (base, other))
    if not np.isfinite([*after, *value]).all():
        return None
    size, is_share = parse_margin(margin_text)
    margin = size * float((after - before).mean()) if is_share else size
    low, high = interval(after, value, paired)
    row: dict[str, Any] = {
        "end": min(ends),
        "last": max(ends),
        "runs": [len(base), len(other)],
        "paired": paired,
        "baseline": float(after.mean()),
        "value": float(value.mean()),
        "difference": float(value.mean() - after.mean()),
        "low": low,
        "high": high,
        "margin": margin,
        "answer": decide(after, value, margin, paired),
    }
    if len(base) == len(other) and all(map(np.array_equal, itertools.chain(*base), itertools.chain(*other))):
        row["answer"] = IDENTICAL
    return row


def sentence(row: Mapping[str, Any], baseline: str, margin: str) -> str:
    """Returns the conclusion of a row of :func:`converge` as a sentence for the report."""
    bounds = f", 95% interval {row['low']:+.3g} to {row['high']:+.3g}" if min(row["runs"]) >= MIN_SEEDS else ""
    share = f", {margin} of {baseline}'s gain" if margin.endswith("%") else ""
    base, other = row["runs"]
    runs = f"{base} and {other} runs, not paired"
    if row["paired"]:
        runs = f"{base} seed, paired" if base == 1 else f"{base} seeds, paired"
    text = f"{row['arm']} and {baseline}, {row['metric']} against {AXES[row['axis']]}: {row['answer']} (difference "
    text += f"{row['difference']:+.3g}{bounds}; margin {row['margin']:.3g}{share}; {runs})"
    if row["answer"] != NOT_ENOUGH:
        return text
    if not bounds:
        return f"{text}: nothing is decided below {MIN_SEEDS} seeds of each"
    if not row["margin"] > 0:
        return f"{text}: {baseline} gained nothing, and a share of that is no margin; name one in units of the reward"
    return text
