"""Statistics of an A/B, computed from the logged metrics of its runs. Results are plain dictionaries for ``summary.json``."""

import contextlib
import fnmatch
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_accel.lab.ab.recipe import NOT_COMPARED, Metrics, Recipe
from rl_accel.rollout.round_driver import METRICS_PREFIX
from rl_accel.rollout.saved import FOLDER
from rl_accel.telemetry.stage_clock import (
    COMPLETED,
    FILE_NAME,
    OTHER,
    OVERLAPPING,
    SAVING,
    VALIDATION,
    read_kept,
    validation_within_step,
)

LEDGER = f"{FOLDER}/ledger.jsonl"
"""Path of tail batching's log of trained prompts (the ledger), below the folder of checkpoints."""
_RESAMPLES = 2000
_MIN_PAIRS = 5
KINDS = ("short", "long", "final")
ALL = "all"
"""Kind of a training step without tail batching, whose rollout waits for all responses. ``KINDS`` are the kinds of steps with tail
batching."""
_PREFIXES = ("rollout/", METRICS_PREFIX)
"""Prefixes of the metrics ``tokens_generated`` and ``tokens_wasted``, in order of preference: counts of the rollout engine, which
also exist without tail batching, then counts of tail batching."""
_LOST = "rollout/prompts_lost"
_BATCH = "data.train_batch_size="
_DATA = {
    "mean length of a response": ("response_length/mean", "rollout/response_len/mean"),
    "share cut at the limit": ("response_length/clip_ratio", "rollout/truncated_ratio"),
    "rewards stopped for time a step": ("rl_accel/reward_timeout/timeouts",),
    "rewards killed a step": ("rl_accel/reward_timeout/killed",),
    "staleness, mean": ("training/off_policy/trajectory_staleness/mean",),
    "staleness, worst": ("training/off_policy/trajectory_staleness_worst/max",),
    "prompts put off a step": (METRICS_PREFIX + "prompts_deferred",),
}
"""Statistics of the training data in the report: mapping from label to the names that the metric has in verl, slime or rl-accel."""


@dataclass(frozen=True)
class RunData:
    """Metrics of one run.

    Attributes:
        seed: None if unknown.
        steps: mapping from step to metric name to value.
        command: words of the command that started the run; may be empty.
        folder: folder in which to look for tail batching's ledger, telemetry and files of responses; None if there is none.
        label: name of the run if the seed is unknown, else "".
        notes: sentences for the report about this and other runs.
    """

    arm: str
    seed: int | None
    steps: Mapping[int, Mapping[str, float]]
    command: Sequence[str] = ()
    folder: Path | None = None
    label: str = ""
    notes: Sequence[str] = ()

    @property
    def name(self) -> str:
        return self.label or f"{self.arm}-seed{self.seed}"

    @property
    def batch_size(self) -> int | None:
        """Number of prompts per step, from the last override ``data.train_batch_size=N`` in the command; None without it."""
        words = [word.lstrip("+") for word in self.command]
        sizes = [word.removeprefix(_BATCH) for word in words if word.startswith(_BATCH)]
        return int(sizes[-1]) if sizes and sizes[-1].isdigit() else None

    def files(self, pattern: str) -> list[Path]:
        """Returns all files below the run's folder, at any depth, whose path ends with the glob ``pattern``."""
        return sorted(self.folder.rglob(pattern)) if self.folder else []

    def training_steps(self, names: Metrics) -> dict[int, Mapping[str, float]]:
        """Returns the metrics of all training steps, by step number. Leaves out steps without a finite total time."""
        return {k: v for k, v in self.steps.items() if math.isfinite(v.get(names.step_metric, math.nan))}


def measured_steps(run: RunData, names: Metrics) -> list[int]:
    """Returns the steps that count in time statistics: all but the first ``names.warmup_steps``, and always the last step."""
    steps = sorted(run.training_steps(names))
    return steps[min(names.warmup_steps, max(0, len(steps) - 1)) :]


def stage_table(runs: Sequence[RunData], arms: Sequence[str], baseline: str, names: Metrics) -> list[dict[str, Any]]:
    """Returns one row per stage with the seconds of each arm, and with the speedup of each arm over the baseline.

    A row is ``{"stage", "arms": {arm: {mean, steps}}, "ratios": {arm: {ratio, low, high, pairs, saved_s}}}``. The values under
    ``ratios`` compare ``pairs`` pairs of steps, one of the baseline and one of the arm, with the same seed and step number.
    ``saved_s`` is the difference of the mean seconds. The other keys are those of :func:`ratio`.
    """
    times = {run.name: _stage_times(run, names) for run in runs}
    rows = []
    for stage in [*names.stages, OTHER, names.step]:
        seconds = {name: by_stage.get(stage, {}) for name, by_stage in times.items()}
        row: dict[str, Any] = {"stage": stage, "arms": {}, "ratios": {}}
        for arm in arms:
            values = [value for run in runs if run.arm == arm for value in seconds[run.name].values()]
            if values:
                row["arms"][arm] = {"mean": float(np.mean(values)), "steps": len(values)}
            couples = [(seconds[a.name], seconds[b.name]) for a, b in pairs(runs, baseline) if b.arm == arm]
            both = [(a[step], b[step]) for a, b in couples for step in sorted(a.keys() & b.keys())]
            if both:
                base, other = np.array(both).T
                saved = float(base.mean() - other.mean())
                row["ratios"][arm] = {**ratio(base, other, paired=True), "pairs": len(both), "saved_s": saved}
        if row["arms"]:
            rows.append(row)
    return rows


def _stage_times(run: RunData, names: Metrics) -> dict[str, dict[int, float]]:
    """Returns the seconds of each stage in the measured steps, as stage -> step -> seconds.

    Two more entries are the whole step, with its validation, and "other", the rest of it outside all stages. Leaves out steps in
    which the time of a stage is not finite. A validation takes 0 seconds in the steps without one.
    """
    times: dict[str, dict[int, float]] = {}
    steps = measured_steps(run, names)
    validates = any(names.stage_prefix + VALIDATION in run.steps[step] for step in steps)
    for step in steps:
        metrics = run.steps[step]
        known = {s: metrics[names.stage_prefix + s] for s in names.stages if names.stage_prefix + s in metrics}
        if not OVERLAPPING.isdisjoint(metrics):
            known.pop(SAVING, None)
        if validates:
            known.setdefault(VALIDATION, 0.0)
        whole = wall_seconds(metrics, names)
        if not all(map(math.isfinite, known.values())):
            continue
        for stage, seconds in {**known, OTHER: whole - sum(known.values()), names.step: whole}.items():
            times.setdefault(stage, {})[step] = seconds
    return times


def wall_seconds(metrics: Mapping[str, float], names: Metrics) -> float:
    """Returns the seconds of a training step with its validation, which verl's V1 trainer times beside the step."""
    beside = metrics.get(names.stage_prefix + VALIDATION, 0.0) - validation_within_step(metrics, names.stage_prefix)
    return metrics[names.step_metric] + beside


def pairs(runs: Sequence[RunData], baseline: str) -> Iterator[tuple[RunData, RunData]]:
    """Yields each pair of a baseline run and a run of another arm with the same seed."""
    base = {run.seed: run for run in runs if run.arm == baseline and run.seed is not None}
    for run in runs:
        if run.arm != baseline and run.seed in base:
            yield base[run.seed], run


def ratio(base: npt.ArrayLike, other: npt.ArrayLike, paired: bool) -> dict[str, Any]:
    """Returns ``{"ratio", "low", "high"}``: ``mean(base) / mean(other)``, and the bounds of its 95% bootstrap interval.

    The bounds are None if there are too few values (below 5 pairs if ``paired``, else below 2 on one side), if no value varies, or
    if a value of ``other`` is not above 0.
    """
    from scipy.stats import bootstrap

    first = np.asarray(base, dtype=float)
    second = np.asarray(other, dtype=float)
    result: dict[str, Any] = {"ratio": None, "low": None, "high": None}
    if len(first) and len(second) and second.mean() > 0:
        result["ratio"] = float(first.mean() / second.mean())
    enough = min(len(first), len(second)) >= (_MIN_PAIRS if paired else 2)
    if enough and result["ratio"] and (second > 0).all() and np.ptp(first) + np.ptp(second) > 0:
        interval = bootstrap(
            (first, second),
            lambda x, y, axis: x.mean(axis=axis) / y.mean(axis=axis),
            n_resamples=_RESAMPLES,
            paired=paired,
            method="percentile",
            random_state=np.random.default_rng(0),
        ).confidence_interval
        result |= {"low": float(interval.low), "high": float(interval.high)}
    return result


def differences(base: RunData, other: RunData) -> dict[str, Any]:
    """Compares the training metrics of two runs with the same seed, at the steps that both runs logged.

    Metrics that match ``NOT_COMPARED`` are left out. NaN equals NaN. At a step where only one run logged a metric, it differs.

    Returns a dict with these keys:

    - ``metrics_compared``: number of compared metrics.
    - ``rows``: one row per metric that differs, sorted by the first step with a difference. ``step``, ``baseline`` and ``arm`` are
      this step and the two values (None if missing). ``abs`` is their absolute difference.
    """
    rows: list[dict[str, Any]] = []
    steps = sorted(base.steps.keys() & other.steps.keys())
    metrics = sorted(compared(set().union(*(run.steps[step] for run in (base, other) for step in steps))))
    for name in metrics:
        values = ((step, base.steps[step].get(name), other.steps[step].get(name)) for step in steps)
        first = next((found for found in values if not same(*found[1:])), None)
        if first is None:
            continue
        step, a, b = first
        gap = None if a is None or b is None else abs(a - b)
        rows.append({"metric": name, "step": step, "baseline": a, "arm": b, "abs": gap})
    rows.sort(key=lambda row: (row["step"], row["metric"]))
    return {"metrics_compared": len(metrics), "rows": rows}


def compared(metrics: Iterable[str]) -> list[str]:
    """Returns ``metrics`` without those that match ``NOT_COMPARED``: they may differ between equal trainings, as times do."""
    return [m for m in metrics if not any(fnmatch.fnmatchcase(m, pattern) for pattern in NOT_COMPARED)]


def same(a: float | None, b: float | None) -> bool:
    """Returns whether two values are exactly equal; NaN equals NaN."""
    return a == b or (a is not None and b is not None and math.isnan(a) and math.isnan(b))


def curve(run: RunData, metric: str) -> dict[str, list[Any]]:
    """Returns ``{"steps": [...], "values": [...]}``: all steps of the run that logged ``metric``, and the values of the metric."""
    points = [(step, metrics[metric]) for step, metrics in run.steps.items() if metric in metrics]
    return {"steps": [step for step, _ in points], "values": [value for _, value in points]}


def gain(run: RunData, metric: str) -> dict[str, float] | None:
    """Returns the rise of ``metric`` in a run; None if fewer than two steps logged a finite value.

    ``before`` and ``after`` are means over the first and the last fifth of the finite values; ``gain`` is their difference.
    """
    values = np.array(curve(run, metric)["values"], dtype=float)
    levels = before_and_after(values[np.isfinite(values)])
    return levels and {"before": levels[0], "after": levels[1], "gain": levels[1] - levels[0]}


def before_and_after(values: npt.NDArray[np.float64]) -> tuple[float, float] | None:
    """Returns the means of the first and the last fifth of the values (at least one value each); None for fewer than two values."""
    part = max(1, len(values) // 5)
    return None if len(values) < 2 else (float(values[:part].mean()), float(values[-part:].mean()))


def rollout_summary(recipe: Recipe, runs: Sequence[RunData], arms: Sequence[str]) -> dict[str, Any]:
    """Returns the section ``rollout`` of ``summary.json``, with these keys:

    - ``ledgers[]``: result of :func:`ledger_counts` for each run with a ledger (tail batching's log of trained prompts).
    - ``without_ledger[]``: names of the runs with tail batching but without a ledger.
    - ``arms[]``: a row per arm. ``seconds`` is the mean rollout time of the measured steps. ``kinds{kind: {steps, seconds}}`` has
      the number of steps and the mean rollout time of each kind (:func:`kind_of`). ``ratio``, ``low`` and ``high`` are the speedup
      over the baseline (:func:`ratio`). ``wasted`` is the share of generated tokens that were not trained on, and ``lost`` the
      largest number of lost prompts in a step; both are None if no run logged them.
    """
    rows = []
    kinds = {arm: _seconds(recipe, [run for run in runs if run.arm == arm]) for arm in arms}
    seconds = {arm: list(itertools.chain(*by_kind.values())) for arm, by_kind in kinds.items()}
    for arm in arms:
        runs_of_arm = [run for run in runs if run.arm == arm]
        of_kinds = [(kind, kinds[arm][kind]) for kind in (*KINDS, ALL) if kind in kinds[arm]]
        base = seconds.get(recipe.baseline, []) if arm != recipe.baseline else []
        row: dict[str, Any] = {
            "arm": arm,
            "seconds": float(np.mean(seconds[arm])) if seconds[arm] else None,
            "kinds": {kind: {"steps": len(s), "seconds": float(np.mean(s))} for kind, s in of_kinds},
            **ratio(base, seconds[arm], paired=False),
            "wasted": _wasted_share(runs_of_arm),
            "lost": max(_values_of(runs_of_arm, _LOST), default=None),
        }
        rows.append(row)
    ledgers = {run.name: file for run in runs for file in run.files(LEDGER)}
    in_rounds = [run.name for run in runs if any(kind_of(metrics) != ALL for metrics in run.steps.values())]
    return {
        "arms": rows,
        "ledgers": [
            {"run": run.name, **ledger_counts(ledgers[run.name], run.batch_size)} for run in runs if run.name in ledgers
        ],
        "without_ledger": [name for name in in_rounds if name not in ledgers],
    }


def kind_of(metrics: Mapping[str, float]) -> str:
    """Returns the kind of a step, read from its metrics: "short", "long" or "final" with tail batching, else ``ALL``."""
    return next((kind for kind in KINDS if metrics.get(f"{METRICS_PREFIX}{kind}_round") == 1.0), ALL)


def _seconds(recipe: Recipe, runs: Iterable[RunData]) -> dict[str, list[float]]:
    """Returns a mapping from kind of step (:func:`kind_of`) to the rollout seconds of the measured steps of this kind."""
    seconds: dict[str, list[float]] = {}
    for run, name in ((run, recipe.metrics.stage_prefix + "gen") for run in runs):
        for metrics in (run.steps[step] for step in measured_steps(run, recipe.metrics)):
            if name in metrics:
                seconds.setdefault(kind_of(metrics), []).append(metrics[name])
    return seconds


def _values_of(runs: Iterable[RunData], metric: str) -> list[float]:
    return [metrics[metric] for run in runs for metrics in run.steps.values() if metric in metrics]


def _wasted_share(runs: Sequence[RunData]) -> float | None:
    """Returns the share of the generated tokens that were not trained on; None if no run logged them."""
    prefix = next((prefix for prefix in _PREFIXES if _values_of(runs, prefix + "tokens_generated")), METRICS_PREFIX)
    generated, wasted = (sum(_values_of(runs, prefix + name)) for name in ("tokens_generated", "tokens_wasted"))
    return wasted / generated if generated else None


def data_changes(runs: Sequence[RunData]) -> dict[str, dict[str, float]]:
    """Returns statistics that show whether arms trained on different data, as statistic -> arm -> mean over the arm's runs.

    Metrics count only at the steps that every run reached. Lengths of responses (from telemetry) include all steps. Leaves out
    statistics without data.
    """
    end = min((max(run.steps) for run in runs), default=0)
    means: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        steps = [metrics for step, metrics in run.steps.items() if step <= end]
        values = {
            label: [metrics[name] for metrics in steps for name in names if name in metrics]
            for label, names in _DATA.items()
        }
        kept = [r for file in run.files(FILE_NAME) for step in read_kept(file).values() for r in step]
        if tokens := [r.tokens for r in kept if r.outcome == COMPLETED and r.tokens]:
            values |= {f"tokens of a response, p{q}": [float(np.percentile(tokens, q))] for q in (50, 90, 99)}
        for label, numbers in values.items():
            if numbers:
                means.setdefault(label, {}).setdefault(run.arm, []).append(float(np.nanmean(numbers)))
    return {label: {arm: float(np.mean(runs)) for arm, runs in by_arm.items()} for label, by_arm in means.items()}


def _read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a JSON Lines file. Skips a line that a killed run left incomplete."""
    for line in path.read_text("utf-8", errors="replace").split("\n"):  # texts may hold other characters that end lines
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict):
                yield entry


def ledger_counts(path: Path, batch: int | None) -> dict[str, Any]:
    """Counts in a ledger, tail batching's log, how often prompts were trained. Returns a dict with two keys:

    - ``epochs[]``: one row per epoch with numbers of prompts: ``prompts`` (all), ``once`` and ``again`` (trained once, more often),
      ``rejected`` (by the group filter), ``failed`` (given up), and ``missing`` (none of these).
    - ``odd_steps[]``: the steps that did not train ``batch`` prompts; empty if ``batch`` is None.

    A ledger does not tell how many prompts an epoch has. ``prompts`` is the largest prompt number of all epochs, and of the last
    epoch alone for the last epoch, which may be unfinished.
    """
    entries = list(_read_json_lines(path))
    trained, rejected, failed = (
        Counter(tuple(map(int, prompt.split(":"))) for entry in entries for prompt in entry.get(name, ()))
        for name in ("trained", "rejected", "failed")
    )
    known = trained.keys() | rejected.keys() | failed.keys()
    epochs = []
    last_epoch = max((epoch for epoch, _ in known), default=0)
    for epoch in range(1, last_epoch + 1):
        prompts = max(row for number, row in known if number == epoch or epoch < last_epoch)
        seen = [trained[epoch, row] for row in range(1, prompts + 1)]
        epochs.append(
            {
                "epoch": epoch,
                "prompts": prompts,
                "once": seen.count(1),
                "again": sum(count > 1 for count in seen),
                "rejected": sum(number == epoch for number, _ in rejected),
                "failed": sum(number == epoch for number, _ in failed),
                "missing": sum((epoch, row) not in known for row in range(1, prompts + 1)),
            }
        )
    odd_steps = [entry.get("step") for entry in entries if batch not in (None, len(entry.get("trained", ())))]
    return {"epochs": epochs, "odd_steps": odd_steps}
