"""Report of an A/B: ``summary.json``, plots, a self-contained ``report.html``, and console output.

``summary.json`` has all measurements and conclusions. Its schema ``rl_accel.ab/3`` has the keys ``schema, created, ok, headline[],
recipe{}, environment{}, runs[], measured_steps{run: [first, last]}, stages[], rollout{}, convergence{}, data{name: {arm: mean}},
differences[], checks[], curves{metric: {run: {steps, values}}}``. NaN is written as null.

:mod:`rl_accel.lab.ab.stats` documents ``stages`` (``stage_table``), ``rollout`` (``rollout_summary``; null unless the recipe has
this section), ``data`` (``data_changes``) and ``differences``. A difference also has ``arm``, ``seed`` and three keys about the
reward: ``steps_compared``, ``parts_at`` (first differing step, or null) and ``text`` (a sentence). ``convergence`` is the result of
:func:`rl_accel.lab.ab.convergence.converge`.
"""

import base64
import contextlib
import importlib.metadata
import os
import platform
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rl_accel.files import strict_json
from rl_accel.lab.ab import plots, stats
from rl_accel.lab.ab.checks import run_checks
from rl_accel.lab.ab.convergence import converge, sentence
from rl_accel.lab.ab.recipe import NOT_COMPARED, Metrics, Recipe
from rl_accel.lab.ab.runner import RunResult, last_lines
from rl_accel.lab.ab.stats import RunData
from rl_accel.lab.ab.tables import tables
from rl_accel.telemetry.logs import read_log
from rl_accel.telemetry.profile import format_seconds

SCHEMA = "rl_accel.ab/3"
_BUSY = 2.0
"""Load average per CPU core at the start of a run above which the report warns not to trust the run's times. At 2, a
process waits for a core as long as it runs."""
_PACKAGES = ("rl-accel", "verl", "torch", "ray", "transformers", "numba", "numpy")
WIDTH = 180
"""Width of tables, in characters, if the output goes to a file or a pipe."""
_COLOURS = {"green": "green", "red": "red", "skipped": "yellow"}


def build(
    recipe: Recipe, recipe_file: Path, out: Path, results: Sequence[RunResult], asked: int, runs: Any = None
) -> dict[str, Any]:
    """Writes summary.json, the plots and report.html into ``out``. Returns the content of summary.json.

    Args:
        recipe_file: path of the recipe; only its name is reported.
        results: results of the runs that were started.
        asked: number of requested runs; 0 skips all checks.
        runs: metrics of the runs; None: those stored in ``out``.
    """
    if runs is None:
        logs = {result.name: out / result.name / "metrics.jsonl" for result in results}
        # a run that failed early has no log, because verl creates the log late
        steps = {name: read_log(log) for name, log in logs.items() if log.exists()}
        runs = [RunData(r.arm, r.seed, steps[r.name], r.command, out / r.name) for r in results if steps.get(r.name)]
    summary = summarise(recipe, recipe_file, results, asked=asked, runs=runs)
    (out / "summary.json").write_text(strict_json(summary))
    pictures = plots.write_plots(summary, out)
    tails = {r.name: last_lines(out / r.name / "train.log") for r in results if r.status in ("failed", "timeout")}
    (out / "report.html").write_text(render(summary, pictures, tails), encoding="utf-8")
    return summary


def summarise(
    recipe: Recipe, recipe_file: Path, results: Sequence[RunResult], asked: int, runs: Sequence[RunData]
) -> dict[str, Any]:
    """Computes the content of summary.json from the metrics of ``runs``. Arguments as in :func:`build`."""
    names = recipe.metrics
    arms = [arm for arm in recipe.arms if any(run.arm == arm for run in runs)]
    stages = stats.stage_table(runs, arms, recipe.baseline, names)
    rollouts = stats.rollout_summary(recipe, runs, arms) if recipe.rollout.report else None
    convergence = converge(runs, arms, recipe.baseline, names)
    checks = []
    if asked:
        checks = run_checks(
            recipe, results, runs, stages=stages, rollout=rollouts, convergence=convergence, asked=asked
        )
    metrics = (names.reward, names.step_metric)
    summary = {
        "schema": SCHEMA,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "ok": not any(check["failed"] for check in checks),
        "headline": [],
        "recipe": {**asdict(recipe), "file": recipe_file.name},
        "environment": _environment(),
        "runs": [_run(result, runs, recipe) for result in results],
        "measured_steps": {r.name: [steps[0], steps[-1]] for r in runs if (steps := stats.measured_steps(r, names))},
        "stages": stages,
        "rollout": rollouts,
        "convergence": convergence,
        "data": stats.data_changes(runs),
        "differences": [_difference(base, other, names) for base, other in stats.pairs(runs, recipe.baseline)],
        "checks": checks,
        "curves": {m: {run.name: stats.curve(run, m) for run in runs} for m in metrics},
    }
    summary["headline"] = _headline(summary, recipe)
    return summary


def _run(result: RunResult, runs: Sequence[RunData], recipe: Recipe) -> dict[str, Any]:
    run = next((r for r in runs if r.name == result.name), None)
    seconds = stats.curve(run, recipe.metrics.step_metric)["values"] if run else []
    first = result.first_step_at
    return {
        **asdict(result),
        "name": result.name,
        "seconds": result.seconds or None,
        "train_seconds": sum(seconds),
        "startup_seconds": max(0.0, first - seconds[0]) if seconds and first is not None else None,
        "reward": stats.gain(run, recipe.metrics.reward) if run else None,
    }


def _difference(base: RunData, other: RunData, names: Metrics) -> dict[str, Any]:
    comparison = stats.differences(base, other)
    reward = names.reward
    steps = [step for step in base.steps if reward in base.steps[step] and reward in other.steps.get(step, {})]
    row = next((row for row in comparison["rows"] if row["metric"] == reward), None)
    if not steps:
        sentence = f"there is no step in which both logged {reward}"
    elif row is None:
        sentence = f"{reward} is identical in all {len(steps)} steps; {_other_metrics(comparison)}"
    else:
        values = " and ".join("not logged" if row[side] is None else f"{row[side]:.9g}" for side in ("baseline", "arm"))
        sentence = f"{reward} parts at step {row['step']} ({values}); {_other_metrics(comparison)}"
    return {
        "arm": other.arm,
        "seed": other.seed,
        "steps_compared": len(steps),
        "parts_at": None if row is None else row["step"],
        "text": f"{other.arm} and {base.arm}, seed {base.seed}: {sentence}",
        **comparison,
    }


def _other_metrics(comparison: dict[str, Any]) -> str:
    """Returns the part of a sentence that says which training metrics of two runs differ. Argument: see ``stats.differences``."""
    rows = comparison["rows"]
    compared = comparison["metrics_compared"]
    if not rows:
        return f"so are all {compared} training metrics"
    first = rows[0]
    size = "" if first["abs"] is None else f" by {first['abs']:.1e}"
    return (
        f"{len(rows)} of {compared} training metrics differ somewhere, "
        f"first {first['metric']} at step {first['step']}{size}"
    )


def _headline(summary: dict[str, Any], recipe: Recipe) -> list[str]:
    """Returns the main conclusions of an A/B as sentences."""
    lines = []
    rows = {row["stage"]: row for row in summary["stages"]}
    step = rows.get(recipe.metrics.step, {})
    for arm, ratio in step.get("ratios", {}).items():
        if ratio["ratio"]:
            base, seconds = (format_seconds(step["arms"][name]["mean"]) for name in (recipe.baseline, arm))
            speedup = f"{ratio['ratio']:.2f}x"
            lines.append(f"{arm} against {recipe.baseline}: a step takes {seconds} instead of {base} ({speedup}).")
    lines += _rollout_lines(summary["rollout"], recipe.baseline) if summary["rollout"] else []
    reward = recipe.metrics.reward
    firsts = [row for row in summary["convergence"]["rows"] if row["metric"] == reward and row["axis"] == "steps"]
    lines += [f"{sentence(row, recipe.baseline, recipe.metrics.margin)}." for row in firsts]
    if recipe.checks.identical or not summary["rollout"]:  # otherwise the arms differ on purpose
        lines += [f"{pair['text']}." for pair in summary["differences"]]
    for run in summary["runs"]:
        if (run["load_average"] or 0.0) > _BUSY * summary["environment"]["cores"]:
            load = f"{run['load_average']:.1f} on {summary['environment']['cores']} cores"
            lines.append(f"The machine was busy when {run['name']} started (load {load}): do not trust its times.")
    red = [check["name"] for check in summary["checks"] if check["status"] == "red"]
    if summary["checks"]:
        lines.append(f"Red checks: {', '.join(red)}." if red else "No check is red.")
    return lines


def _rollout_lines(rollout: dict[str, Any], baseline: str) -> list[str]:
    rows = {row["arm"]: row for row in rollout["arms"]}
    lines = []
    for arm, row in rows.items():
        if arm == baseline or row.get("ratio") is None:
            continue
        seconds, base = (format_seconds(rows[name]["seconds"]) for name in (arm, baseline))
        line = f"{arm}: rollouts take {seconds} a step instead of {base}"
        line += f" ({row['ratio']:.2f}x"
        line += f", 95% interval {row['low']:.2f}-{row['high']:.2f})" if row["low"] is not None else ")"
        line += f"; {row['wasted']:.0%} of the tokens are wasted" if row["wasted"] is not None else ""
        lines.append(line + ".")
    return lines


def _environment() -> dict[str, Any]:
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    cores = len(os.sched_getaffinity(0))
    return {"python": platform.python_version(), "system": platform.platform(), "cores": cores, "versions": versions}


def render(summary: dict[str, Any], pictures: Sequence[Path], tails: dict[str, str]) -> str:
    """Returns the HTML page of an A/B, with embedded plots. ``tails``: last lines of the log of each failed run."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {
        "seconds": lambda value: "-" if value is None else format_seconds(value),
        "figures": lambda value: "-" if value is None else f"{value:.6g}",
        "small": lambda value: "-" if value is None else f"{value:.1e}",
        "command": shlex.join,
    }
    text = resources.files("rl_accel.lab.ab").joinpath("report.html.j2").read_text(encoding="utf-8")
    images = [(path.stem.replace("_", " "), base64.b64encode(path.read_bytes()).decode()) for path in pictures]
    page = {"s": summary, "images": images, "tails": tails, "tables": tables(summary), "not_compared": NOT_COMPARED}
    return str(environment.from_string(text).render(page))


def show(summary: dict[str, Any], console: Console) -> None:
    """Prints the tables and the main conclusions of an A/B. ``summary`` is the content of summary.json."""
    for text_table in tables(summary):
        console.print(text_table.title, soft_wrap=True)
        table = Table(*text_table.columns)
        for row in text_table.rows:
            cells = [Text(cell, _COLOURS.get(cell.partition(" (")[0], "")) for cell in row]
            table.add_row(*cells, style="bold" if row[0] == summary["recipe"]["metrics"]["step"] else "")
        if text_table.rows:
            console.print(table)
        for note in text_table.notes:
            console.print(note, soft_wrap=True)
    for line in summary["headline"]:
        console.print(line, soft_wrap=True)
