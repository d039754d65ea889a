"""What a report says of rollouts: their seconds by kind of round, lengths trained on, tokens wasted, and which prompts.

Reads what tail batching logs, and otherwise only what verl logs and dumps for any run.
"""

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_accel.lab.ab.extra import needs
from rl_accel.lab.ab.recipe import Recipe
from rl_accel.lab.ab.runner import RunResult
from rl_accel.lab.ab.stats import RunData, gain, measured_steps, ratio_interval

KINDS = ("short", "long", "final")
ALL = "all"
"""The kind of a rollout that waits for every response, as those of a stock run do."""
_PREFIX = "rl_accel/tail_batching/"
_COUNTED = ("rollout/", _PREFIX)
"""Who counts tokens, the most trusted first: what an engine says of a whole rollout, what tail batching reports."""
_LOST = "rollout/prompts_lost"
_BATCH = "data.train_batch_size="
_MIN_SEEDS = 3


def summarise(
    recipe: Recipe, runs: Sequence[RunData], results: Sequence[RunResult], arms: Sequence[str], out: Path
) -> dict[str, Any]:
    """Return the ``rollout`` part of a summary.

    ``arms[]``: one an arm with ``seconds`` (mean rollout seconds of the measured steps), ``ratio`` of the baseline's to
    it with its 95% interval ``low``, ``high`` (bootstrap over steps), ``kinds{kind: {steps, seconds}}``, the share of
    tokens that were ``wasted``, the prompts ``lost``, mean ``accepted`` and ``cancelled`` lengths of the same prompts,
    ``lengths`` (of the responses trained on, see :func:`_lengths`) and ``reward`` (see :func:`_final_rewards`). ``ledgers[]``: one
    a run that kept one (see :func:`_ledger`); ``without_ledger[]``: runs with rounds and none. ``series{run: {...}}``: step
    by step (see :func:`_series`).
    """
    batches = {result.name: _batch_size(result.command) for result in results}
    seconds = {arm: _seconds(recipe, [run for run in runs if run.arm == arm]) for arm in arms}
    base = seconds.get(recipe.baseline, [])
    rows = []
    for arm in arms:
        ours = [run for run in runs if run.arm == arm]
        row: dict[str, Any] = {"arm": arm, "seconds": float(np.mean(seconds[arm])) if seconds[arm] else None}
        row["kinds"] = _kinds(recipe, ours)
        row |= _ratio(base if arm != recipe.baseline else [], seconds[arm])
        row |= _waste(ours)
        row["lost"] = _lost(ours)
        row["lengths"] = _lengths(out / _name(run) / recipe.rollout.data for run in ours)
        row["reward"] = _final_rewards(recipe, runs, arm) if arm != recipe.baseline else None
        rows.append(row)
    kept = {run: out / run / recipe.rollout.ledger for run in map(_name, runs)}
    wanted = [_name(run) for run in runs if any(kind_of(metrics) != ALL for metrics in run.steps.values())]
    return {
        "arms": rows,
        "ledgers": [{"run": run, **_ledger(path, batches.get(run))} for run, path in kept.items() if path.exists()],
        "without_ledger": [run for run in wanted if not kept[run].exists()],
        "series": {_name(run): _series(recipe, run, batches.get(_name(run))) for run in runs},
    }


def kind_of(metrics: Mapping[str, float]) -> str:
    """Return the kind of the round of one step."""
    return next((kind for kind in KINDS if metrics.get(f"{_PREFIX}{kind}_round") == 1.0), ALL)


def _name(run: RunData) -> str:
    return f"{run.arm}-seed{run.seed}"


def _batch_size(command: Sequence[str]) -> int | None:
    """Prompts of a step, as the last override says."""
    found = [word.removeprefix(_BATCH) for word in command if word.startswith(_BATCH)]
    return int(found[-1]) if found and found[-1].isdigit() else None


def _rollout_steps(recipe: Recipe, runs: Iterable[RunData]) -> Iterator[Mapping[str, float]]:
    """Metrics of the measured steps that have the time of their rollout."""
    for run in runs:
        for step in measured_steps(run, recipe.metrics):
            if recipe.metrics.stage_prefix + "gen" in run.steps[step]:
                yield run.steps[step]


def _seconds(recipe: Recipe, runs: Iterable[RunData]) -> list[float]:
    return [metrics[recipe.metrics.stage_prefix + "gen"] for metrics in _rollout_steps(recipe, runs)]


def _kinds(recipe: Recipe, runs: Iterable[RunData]) -> dict[str, Any]:
    found: dict[str, list[float]] = {}
    for metrics in _rollout_steps(recipe, runs):
        found.setdefault(kind_of(metrics), []).append(metrics[recipe.metrics.stage_prefix + "gen"])
    order = [kind for kind in (*KINDS, ALL) if kind in found]
    return {kind: {"steps": len(found[kind]), "seconds": float(np.mean(found[kind]))} for kind in order}


def _ratio(base: Sequence[float], ours: Sequence[float]) -> dict[str, float | None]:
    """Ratio of the means with its 95% interval; steps of different arms are no pairs."""
    if not base or not ours or not np.mean(ours) > 0:
        return {"ratio": None, "low": None, "high": None}
    found: dict[str, float | None] = {"ratio": float(np.mean(base) / np.mean(ours)), "low": None, "high": None}
    if min(len(base), len(ours)) > 1:
        found["low"], found["high"] = ratio_interval(base, ours, np.mean, paired=False)
    return found


def _waste(runs: Iterable[RunData]) -> dict[str, float | None]:
    """Share of all generated tokens that were thrown away, and lengths of accepted and cancelled responses of the same prompts."""
    wasted = generated = 0.0
    accepted, cancelled = [], []
    for run in runs:
        for metrics in run.steps.values():
            prefix = next((prefix for prefix in _COUNTED if prefix + "tokens_generated" in metrics), None)
            if prefix is not None:
                generated += metrics[prefix + "tokens_generated"]
                wasted += metrics[prefix + "tokens_wasted"]
            if _PREFIX + "cancelled_tokens_mean" in metrics:
                accepted.append(metrics[_PREFIX + "accepted_tokens_mean"])
                cancelled.append(metrics[_PREFIX + "cancelled_tokens_mean"])
    return {
        "wasted": wasted / generated if generated else None,
        "accepted": float(np.mean(accepted)) if accepted else None,
        "cancelled": float(np.mean(cancelled)) if cancelled else None,
    }


def _lost(runs: Iterable[RunData]) -> float | None:
    """Most prompts lost in a run, if any run says."""
    found = [metrics[_LOST] for run in runs for metrics in run.steps.values() if _LOST in metrics]
    return max(found, default=None)


def _lengths(folders: Iterable[Path]) -> dict[str, Any] | None:
    """Count, mean and 101 quantiles of the lengths, in characters, of the responses trained on; None if none were dumped."""
    files = [file for folder in folders for file in sorted(folder.glob("*.jsonl"))]
    found = [len(entry["output"]) for file in files for entry in _entries(file) if "output" in entry]
    if not found:
        return None
    quantiles: npt.NDArray[np.float64] = np.quantile(found, np.linspace(0, 1, 101))
    return {"responses": len(found), "mean": float(np.mean(found)), "quantiles": quantiles.tolist()}


def _final_rewards(recipe: Recipe, runs: Sequence[RunData], arm: str) -> dict[str, Any] | None:
    """Difference of final rewards (mean of the last fifth of the steps), arm less baseline, over the seeds both have.

    ``low`` and ``high`` bound its 95% interval by Student's t, from three seeds on.
    """
    finals = {(run.arm, run.seed): found["after"] for run in runs if (found := gain(run, recipe.metrics.reward))}
    seeds = [seed for name, seed in finals if name == arm and (recipe.baseline, seed) in finals]
    if not seeds:
        return None
    differences = np.array([finals[arm, seed] - finals[recipe.baseline, seed] for seed in seeds])
    row: dict[str, Any] = {
        "seeds": seeds,
        "final": [finals[arm, seed] for seed in seeds],
        "difference": float(differences.mean()),
        "low": None,
        "high": None,
    }
    if len(seeds) >= _MIN_SEEDS:
        error = differences.std(ddof=1) / math.sqrt(len(seeds))
        width = float(needs("scipy.stats").t.ppf(0.975, len(seeds) - 1) * error)
        row["low"], row["high"] = row["difference"] - width, row["difference"] + width
    return row


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, one a line; a line that a killed run did not finish is left out."""
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict):
                yield entry


def _ledger(path: Path, batch: int | None) -> dict[str, Any]:
    """Count how often each prompt was trained: ``epochs[]`` with ``prompts`` taken, ``once``, ``again`` (more than once),
    ``rejected``, ``failed`` and ``missing`` (none of these); and ``odd_steps[]`` that trained other than ``batch`` prompts.

    Every epoch but the last is taken to have as many prompts as the longest, so that one which lost its last ones shows.
    """
    odd_steps = []
    counts: dict[str, Counter[tuple[int, int]]] = {name: Counter() for name in ("trained", "rejected", "failed")}
    for entry in _entries(path):
        if batch is not None and len(entry.get("trained", ())) != batch:
            odd_steps.append(entry.get("step"))
        for name, counter in counts.items():
            for prompt_id in entry.get(name, ()):
                epoch, row = prompt_id.split(":")
                counter[int(epoch), int(row)] += 1
    trained = counts["trained"]
    known = set().union(*counts.values())
    epochs = []
    last_epoch = max((epoch for epoch, _ in known), default=0)
    for epoch in range(1, last_epoch + 1):
        taken = max(row for number, row in known if number == epoch or epoch < last_epoch)
        seen = [trained[epoch, row] for row in range(1, taken + 1)]
        epochs.append(
            {
                "epoch": epoch,
                "prompts": taken,
                "once": seen.count(1),
                "again": sum(count > 1 for count in seen),
                "rejected": sum(number == epoch for number, _ in counts["rejected"]),
                "failed": sum(number == epoch for number, _ in counts["failed"]),
                "missing": sum((epoch, row) not in known for row in range(1, taken + 1)),
            }
        )
    return {"epochs": epochs, "odd_steps": odd_steps}


def _series(recipe: Recipe, run: RunData, batch: int | None) -> dict[str, list[Any]]:
    """Step by step: kind, rollout seconds, queue length, reward, and at its end the wall seconds and prompts so far."""
    names = recipe.metrics
    steps = run.training_steps(names)
    whole = np.cumsum([metrics[names.stage_prefix + names.step] for metrics in steps.values()])
    return {
        "steps": list(steps),
        "kind": [kind_of(metrics) for metrics in steps.values()],
        "seconds": [metrics.get(names.stage_prefix + "gen") for metrics in steps.values()],
        "queue": [metrics.get(_PREFIX + "queue_length") for metrics in steps.values()],
        "reward": [metrics.get(names.reward) for metrics in steps.values()],
        "wall_seconds": whole.tolist(),
        "prompts": [] if batch is None else [batch * (index + 1) for index in range(len(steps))],
    }
