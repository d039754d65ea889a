"""``summary.json``: everything an A/B measured and concluded, under a versioned schema.

``rl_accel.ab/1``: ``schema, created, ok, headline[], recipe{}, environment{}, runs[], measured_steps{run: [first,
last]}, stages[]`` (see :func:`~rl_accel.lab.ab.stats.stage_table`), ``rollout{}`` (see
:func:`~rl_accel.lab.ab.rollout.summarise`; null unless the recipe asks for it), ``reward_verdicts[], differences[]`` (one a pair
of runs, see :func:`~rl_accel.lab.ab.stats.first_differences`), ``checks[], curves{metric: {run: {steps, values}}}``.
NaN is null.
"""

import importlib.metadata
import json
import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl_accel.lab.ab import rollout
from rl_accel.lab.ab.checks import pairs, run_checks
from rl_accel.lab.ab.metrics_log import read_steps
from rl_accel.lab.ab.recipe import Metrics, Recipe
from rl_accel.lab.ab.runner import RunResult
from rl_accel.lab.ab.stats import RunData, agreement, curve, first_differences, gain, measured_steps, stage_table

SCHEMA = "rl_accel.ab/1"
_BUSY = 2.0
"""Load average per core at the start of a run above which its times are called into question."""
_PACKAGES = ("rl-accel", "verl", "torch", "ray", "transformers", "numba", "numpy")


def load_runs(results: Sequence[RunResult], out: Path) -> list[RunData]:
    """Read the kept metrics of each run that has any."""
    runs = [RunData(r.arm, r.seed, read_steps(out / r.name / "metrics.jsonl")) for r in results]
    return [run for run in runs if run.steps]


def summarise(recipe: Recipe, recipe_file: Path, out: Path, results: Sequence[RunResult], asked: int) -> dict[str, Any]:
    """Compute the whole summary from the kept metrics. ``asked`` is the number of runs that were wanted."""
    names = recipe.metrics
    runs = load_runs(results, out)
    arms = [arm for arm in recipe.arms if any(run.arm == arm for run in runs)]
    stages = stage_table(runs, arms, recipe.baseline, names)
    rollouts = rollout.summarise(recipe, runs, results, arms, out) if recipe.rollout.report else None
    checks = run_checks(recipe, results, runs, stages, rollouts, out, asked)
    couples = list(pairs(runs, recipe.baseline))
    differences: list[dict[str, Any]] = [
        {"arm": other.arm, "seed": other.seed, "rows": first_differences(base, other, names)} for base, other in couples
    ]
    verdicts = [
        _reward_verdict(base, other, names, found["rows"])
        for (base, other), found in zip(couples, differences, strict=True)
    ]
    metrics = list(dict.fromkeys([names.reward, *names.curves, names.stage_prefix + names.step]))
    summary = {
        "schema": SCHEMA,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "ok": not any(check.failed for check in checks),
        "headline": [],
        "recipe": {**asdict(recipe), "file": recipe_file.name},
        "environment": _environment(),
        "runs": [_run(result, runs, recipe) for result in results],
        "measured_steps": {f"{run.arm}-seed{run.seed}": _ends(measured_steps(run, names)) for run in runs},
        "stages": stages,
        "rollout": rollouts,
        "reward_verdicts": verdicts,
        "differences": differences,
        "checks": [{**asdict(check), "failed": check.failed} for check in checks],
        "curves": {m: {f"{run.arm}-seed{run.seed}": curve(run, m) for run in runs} for m in metrics},
    }
    summary["headline"] = _headline(summary, recipe)
    return summary


def write(summary: dict[str, Any], path: Path) -> None:
    """Write a summary as strict JSON: NaN and infinities become null."""
    path.write_text(json.dumps(_strict(summary), indent=1, allow_nan=False) + "\n")


def _run(result: RunResult, runs: Sequence[RunData], recipe: Recipe) -> dict[str, Any]:
    run = next((r for r in runs if (r.arm, r.seed) == (result.arm, result.seed)), None)
    step = recipe.metrics.stage_prefix + recipe.metrics.step
    seconds = curve(run, step)["values"] if run else []
    first = result.first_step_at
    return {
        **asdict(result),
        "name": result.name,
        "train_seconds": sum(seconds),
        "startup_seconds": max(0.0, first - seconds[0]) if seconds and first is not None else None,
        "reward": gain(run, recipe.metrics.reward) if run else None,
        "log": f"{result.name}/train.log",
        "metrics": f"{result.name}/metrics.jsonl",
    }


def _reward_verdict(base: RunData, other: RunData, names: Metrics, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    reward, found = names.reward, agreement(base, other, names, rows)
    steps = [s for s in base.steps if reward in base.steps[s] and reward in other.steps.get(s, {})]
    row = next((row for row in rows if row["metric"] == reward), None)
    verdict: dict[str, Any] = {
        "arm": other.arm,
        "seed": other.seed,
        "metric": reward,
        "steps_compared": len(steps),
        **found,
    }
    verdict["parts_at"] = row["step"] if row else None
    who = f"{other.arm} and {base.arm}, seed {base.seed}"
    if not steps:
        text = f"{who}: no step in which both logged {reward}"
    elif row is None:
        text = f"{who}: {reward} is identical in all {len(steps)} steps"
    else:
        text = f"{who}: {reward} parts at step {row['step']} ({_number(row['baseline'])} and {_number(row['arm'])})"
    if steps:
        text += f"; {_others(rows, found)}"
    verdict["text"] = text
    return verdict


def _others(rows: Sequence[dict[str, Any]], found: dict[str, Any]) -> str:
    if not rows:
        return f"so are all {found['metrics_compared']} training metrics"
    first = rows[0]
    amount = f" by {first['abs']:.1e}" if first["abs"] is not None else ""
    text = f"{len(rows)} of {found['metrics_compared']} training metrics differ somewhere, first {first['metric']}"
    text += f" at step {first['step']}{amount} ({first['phase']})"
    same = found["identical_phases"]
    return f"{text}; identical throughout: {', '.join(same)}" if same else text


def _headline(summary: dict[str, Any], recipe: Recipe) -> list[str]:
    """The few sentences a reader wants first."""
    lines = []
    rows = {row["stage"]: row for row in summary["stages"]}
    for arm in rows.get(recipe.metrics.step, {}).get("ratios", {}):
        parts = []
        for stage, label in ((recipe.metrics.step, "a step"), ("adv", "the advantage stage")):
            found = rows.get(stage, {}).get("ratios", {}).get(arm)
            if found and found["ratio"]:
                base, ours = (rows[stage]["arms"][name][recipe.metrics.average] for name in (recipe.baseline, arm))
                parts.append(f"{label} takes {seconds(ours)} instead of {seconds(base)} ({found['ratio']:.2f}x)")
        if parts:
            lines.append(f"{arm} against {recipe.baseline}: {', '.join(parts)}.")
    lines += _rollout_lines(summary["rollout"], recipe.baseline) if summary["rollout"] else []
    if recipe.checks.identical or not summary["rollout"]:  # else the arms differ on purpose
        lines += [f"{verdict['text']}." for verdict in summary["reward_verdicts"]]
    for run in summary["runs"]:
        if (run["load_average"] or 0.0) > _BUSY * summary["environment"]["cores"]:
            load = f"{run['load_average']:.1f} on {summary['environment']['cores']} cores"
            lines.append(f"The machine was busy when {run['name']} started (load {load}): do not trust its times.")
    red = [check["name"] for check in summary["checks"] if check["status"] == "red"]
    lines.append(f"Red checks: {', '.join(red)}." if red else "No check is red.")
    return lines


def _rollout_lines(rollout: dict[str, Any], baseline: str) -> list[str]:
    rows = {row["arm"]: row for row in rollout["arms"]}
    lines = []
    for arm, row in rows.items():
        if arm == baseline or row.get("ratio") is None:
            continue
        line = f"{arm}: rollouts take {seconds(row['seconds'])} a step instead of {seconds(rows[baseline]['seconds'])}"
        line += f" ({row['ratio']:.2f}x"
        line += f", 95% interval {row['low']:.2f}-{row['high']:.2f})" if row["low"] is not None else ")"
        line += f"; {row['wasted']:.0%} of the tokens are wasted" if row["wasted"] is not None else ""
        reward = row["reward"]
        if reward:
            line += f"; the final reward differs by {reward['difference']:+.3f}"
            bounds = f" ({reward['low']:+.3f} to {reward['high']:+.3f})" if reward["low"] is not None else ""
            line += f"{bounds} over {len(reward['seeds'])} seeds"
        lines.append(line + ".")
    return lines


def seconds(value: float) -> str:
    """Format a duration with three figures, in s or ms."""
    return f"{value:.3g} s" if value >= 0.1 else f"{value * 1000:.3g} ms"


def _number(value: float | None) -> str:
    return "not logged" if value is None else f"{value:.9g}"


def _ends(steps: Sequence[int]) -> list[int]:
    return [steps[0], steps[-1]] if steps else []


def _environment() -> dict[str, Any]:
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"python": platform.python_version(), "system": platform.platform(), "cores": cores, "versions": versions}


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
