"""Statistics over the kept metrics: stage times and their ratios, where training metrics first differ, curves.

All functions are pure: they take :class:`RunData` and return plain dictionaries ready for ``summary.json``.
"""

import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_accel.lab.ab.extra import needs
from rl_accel.lab.ab.recipe import Metrics

OTHER = "other"
_RESAMPLES = 2000
_MIN_PAIRS = 5
_PHASES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "rollout and reward",
        (
            "response*",
            "prompt_length/*",
            "critic/score/*",
            "*num_turns/*",
            "tool_call*",
            "training/off_policy/*",
            "global_seqlen/*",
        ),
    ),
    ("rollout against trainer probabilities", ("training/rollout_*", "rollout_corr/*")),
    ("log-probabilities and values", ("critic/values/*", "actor/entropy", "actor/reward_kl*", "critic/rewards/*")),
    ("advantages and returns", ("critic/advantages/*", "critic/returns/*", "critic/vf_explained_var")),
    ("update", ("actor/*", "critic/*", "variance_proxy/*")),
    ("validation", ("val-*", "val/*")),
)
"""The order in which one training step computes its metrics; a step parts where its earliest phase differs."""


@dataclass(frozen=True)
class RunData:
    """The metrics of one run, step -> name -> value."""

    arm: str
    seed: int
    steps: Mapping[int, Mapping[str, float]]

    def training_steps(self, names: Metrics) -> dict[int, Mapping[str, float]]:
        """Steps that have the time of a whole step; a validation before training has none."""
        return {k: v for k, v in self.steps.items() if names.stage_prefix + names.step in v}


def measured_steps(run: RunData, names: Metrics) -> list[int]:
    """The steps whose times count: all but the first ``warmup_steps``, but always at least the last one."""
    steps = sorted(run.training_steps(names))
    return steps[min(names.warmup_steps, max(0, len(steps) - 1)) :]


def stage_table(runs: Sequence[RunData], arms: Sequence[str], baseline: str, names: Metrics) -> list[dict[str, Any]]:
    """Return one row a stage: seconds of each arm and, for each arm but the baseline, the ratio baseline/arm.

    A row is ``{"stage", "arms": {arm: {median, mean, p25, p75, steps}}, "ratios": {arm: {ratio, low, high, pairs,
    saved_s}}}``. The ratio is of averages over the steps both arms measured with the same seed; ``low`` and ``high``
    bound its 95% interval by a paired bootstrap over those steps (null below 5 pairs). The interval is about the noise
    between the steps of these runs, not about other machines or loads. ``saved_s`` is the difference of the averages.
    """
    times = {(run.arm, run.seed): _stage_times(run, names) for run in runs}
    rows = []
    for stage in [*names.stages, OTHER, names.step]:
        row: dict[str, Any] = {"stage": stage, "arms": {}, "ratios": {}}
        for arm in arms:
            values = [v for (a, _), steps in times.items() if a == arm for v in steps.get(stage, {}).values()]
            if values:
                row["arms"][arm] = _summary(values)
        for arm in arms:
            if arm != baseline and baseline in row["arms"] and arm in row["arms"]:
                pairs = _pairs(times, baseline, arm, stage)
                if len(pairs):
                    row["ratios"][arm] = _ratio(pairs, np.median if names.average == "median" else np.mean)
        if row["arms"]:
            rows.append(row)
    return rows


def _stage_times(run: RunData, names: Metrics) -> dict[str, dict[int, float]]:
    """stage -> step -> seconds of the measured steps, with what no stage covers as "other"."""
    times: dict[str, dict[int, float]] = {}
    for step in measured_steps(run, names):
        metrics = run.steps[step]
        known = {s: metrics[names.stage_prefix + s] for s in names.stages if names.stage_prefix + s in metrics}
        whole = metrics[names.stage_prefix + names.step]
        for stage, seconds in {**known, OTHER: whole - sum(known.values()), names.step: whole}.items():
            times.setdefault(stage, {})[step] = seconds
    return times


def _pairs(times: Any, baseline: str, arm: str, stage: str) -> npt.NDArray[np.float64]:
    found = []
    for (name, seed), stages in times.items():
        if name == baseline and (arm, seed) in times:
            ours, theirs = times[arm, seed].get(stage, {}), stages.get(stage, {})
            found += [(theirs[step], ours[step]) for step in sorted(ours.keys() & theirs.keys())]
    return np.array(found, dtype=np.float64).reshape(-1, 2)


def _summary(values: Sequence[float]) -> dict[str, Any]:
    p25, median, p75 = np.quantile(values, [0.25, 0.5, 0.75])
    return {
        "median": float(median),
        "mean": float(np.mean(values)),
        "p25": float(p25),
        "p75": float(p75),
        "steps": len(values),
    }


def _ratio(pairs: npt.NDArray[np.float64], average: Callable[..., Any]) -> dict[str, Any]:
    base, ours = average(pairs, axis=0)
    ratio: dict[str, Any] = {"ratio": _divide(base, ours), "low": None, "high": None, "pairs": len(pairs)}
    ratio["saved_s"] = float(base - ours)
    if len(pairs) >= _MIN_PAIRS and (pairs > 0).all() and len(np.unique(pairs, axis=0)) > 1:
        ratio["low"], ratio["high"] = ratio_interval(pairs[:, 0], pairs[:, 1], average, paired=True)
    return ratio


def ratio_interval(
    base: npt.ArrayLike, ours: npt.ArrayLike, average: Callable[..., Any], paired: bool
) -> tuple[float, float]:
    """Bound ``average(base) / average(ours)`` by a 95% bootstrap interval over the values, the same ones on each run."""
    interval = (
        needs("scipy.stats")
        .bootstrap(
            (base, ours),
            lambda x, y, axis: average(x, axis=axis) / average(y, axis=axis),
            n_resamples=_RESAMPLES,
            paired=paired,
            vectorized=True,
            method="percentile",
            random_state=np.random.default_rng(0),
        )
        .confidence_interval
    )
    return float(interval.low), float(interval.high)


def _divide(a: float, b: float) -> float | None:
    return float(a / b) if b > 0 else None


def first_differences(base: RunData, other: RunData, names: Metrics) -> list[dict[str, Any]]:
    """Return, for each training metric that ever differs between two runs of one seed, where and by how much.

    Only steps both runs logged are compared; metrics that match ``names.not_compared`` are left out. Rows are
    ``{"metric", "phase", "step", "baseline", "arm", "abs", "rel", "max_abs", "steps_compared", "steps_differing"}``,
    the earliest first and, within a step, in the order a training step computes them. NaN equals NaN; a metric that
    only one run logged at a step counts as differing there, with null for the missing value.
    """
    rows = []
    steps = sorted(base.steps.keys() & other.steps.keys())
    every = sorted({name for run in (base, other) for step in steps for name in run.steps[step]})
    for name in compared(every, names):
        pairs = [(step, base.steps[step].get(name), other.steps[step].get(name)) for step in steps]
        pairs = [pair for pair in pairs if pair[1:] != (None, None)]
        differing = [pair for pair in pairs if not _same(pair[1], pair[2])]
        if not differing:
            continue
        step, a, b = differing[0]
        gaps = [abs(x - y) for _, x, y in differing if x is not None and y is not None and math.isfinite(x - y)]
        gap = abs(a - b) if a is not None and b is not None else None
        scale = max(abs(a), abs(b)) if a is not None and b is not None else 0.0
        rows.append(
            {
                "metric": name,
                "phase": phase(name),
                "step": step,
                "baseline": a,
                "arm": b,
                "abs": gap,
                "rel": gap / scale if gap is not None and scale > 0 else None,
                "max_abs": max(gaps, default=None),
                "steps_compared": len(pairs),
                "steps_differing": len(differing),
            }
        )
    order = [label for label, _ in _PHASES]
    rank = {label: index for index, label in enumerate(order)}
    return sorted(rows, key=lambda row: (row["step"], rank.get(row["phase"], len(order)), row["metric"]))


def agreement(base: RunData, other: RunData, names: Metrics, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how many training metrics were compared and differ (``rows`` of them), and which parts of a step do not."""
    steps = base.steps.keys() & other.steps.keys()
    every = compared({name for run in (base, other) for step in steps for name in run.steps[step]}, names)
    parted = {row["phase"] for row in rows}
    order = [label for label, _ in _PHASES]
    same = [label for label in order if label not in parted and any(phase(name) == label for name in every)]
    return {"metrics_compared": len(every), "metrics_differing": len(rows), "identical_phases": same}


def compared(metrics: Iterable[str], names: Metrics) -> list[str]:
    """Leave out the metrics that may differ between arms (times, throughput, memory, our own)."""
    return [m for m in metrics if not any(fnmatch.fnmatchcase(m, pattern) for pattern in names.not_compared)]


def phase(metric: str) -> str:
    """The part of a training step that computes a metric."""
    for label, patterns in _PHASES:
        if any(fnmatch.fnmatchcase(metric, pattern) for pattern in patterns):
            return label
    return "other"


def _same(a: float | None, b: float | None) -> bool:
    return a == b or (a is not None and b is not None and math.isnan(a) and math.isnan(b))


def curve(run: RunData, metric: str) -> dict[str, list[Any]]:
    """Return ``{"steps": [...], "values": [...]}`` of the steps that logged ``metric``."""
    points = [(step, metrics[metric]) for step, metrics in run.steps.items() if metric in metrics]
    return {"steps": [step for step, _ in points], "values": [value for _, value in points]}


def gain(run: RunData, metric: str) -> dict[str, float] | None:
    """Mean of ``metric`` over the first and the last fifth of the steps (at least one each); None below two steps."""
    values = [value for value in curve(run, metric)["values"] if math.isfinite(value)]
    if len(values) < 2:
        return None
    part = max(1, len(values) // 5)
    before, after = float(np.mean(values[:part])), float(np.mean(values[-part:]))
    return {"before": before, "after": after, "gain": after - before}
