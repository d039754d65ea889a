"""The command ``rl-accel compare``: makes an A/B report from training runs that were launched elsewhere."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from rl_accel.console import wide_console
from rl_accel.errors import RecipeError, did_you_mean
from rl_accel.lab.ab import report
from rl_accel.lab.ab.recipe import Arm, Metrics, Recipe, RolloutSection, load, parse_margin
from rl_accel.lab.ab.runner import RunResult, load_result
from rl_accel.lab.ab.stats import RunData
from rl_accel.rollout.round_driver import METRICS_PREFIX
from rl_accel.telemetry.readers import read, starts_of
from rl_accel.telemetry.run_log import Logged

SLIME = Metrics("rollout/raw_reward", "perf/", "step_time", ["train_wait_time", "train_time"])
"""Names of the metrics that slime logs: reward, step time, and the times of two stages (waiting and training) that fill a step."""


def gather(
    arms: Mapping[str, Sequence[str]], metrics: Mapping[str, Any], batch_size: int | None
) -> tuple[Recipe, list[RunData]]:
    """Reads the runs of each arm. Returns a recipe with settings for the comparison, and the metrics of the runs.

    Args:
        arms: paths of the runs of each arm, the baseline first.
        metrics: values by field of :class:`Metrics`, such as ``{"margin": "5%"}``. They replace the recipe's values.
        batch_size: number of prompts per step; None: read from each run.

    Raises:
        RlAccelError: a run cannot be read, or no run of an arm logged the reward metric.
    """
    logged = {arm: {path: read(path) for path in paths} for arm, paths in arms.items()}
    recipe = _recipe(arms, logged)
    recipe.metrics = replace(recipe.metrics, **metrics)
    parse_margin(recipe.metrics.margin)
    runs: list[RunData] = []
    notes: list[str] = []
    for arm, logs in logged.items():
        names = set().union(*(run.metric_names for run in logs.values()))
        reward = recipe.metrics.reward
        if reward not in names:
            hint = did_you_mean(reward, names)
            raise RecipeError(f"{arm}: no run logged {reward}{hint}; --reward names what to compare in all arms")
        seeds = list(map(_seed_of, logs))
        are_known = None not in seeds and len(set(seeds)) == len(seeds)
        if not are_known:
            notes.append(f"{arm}: its runs pair with none, as their paths do not tell a seed of each (seedN)")
        for index, (path, run) in enumerate(logs.items()):
            seed = seeds[index] if are_known else None
            label = "" if are_known else f"{arm}-run{index}"
            folder = Path(path) if Path(path).is_dir() else None
            result = load_result(Path(path))
            batch = batch_size or run.batch[0]
            command = [*(result.command if result else ()), *([f"data.train_batch_size={batch}"] if batch else ())]
            runs.append(RunData(arm, seed, run.steps, command, folder=folder, label=label))
            where = f"{run.source}, steps {min(run.steps)} to {max(run.steps)}, {path}"
            notes.append(f"{runs[-1].name}: {'; '.join([where, *run.notes])}")
    notes.append("seconds and hours compare only what ran on equal GPUs, which logs do not tell")
    return recipe, [replace(runs[0], notes=notes), *runs[1:]]


def _recipe(arms: Mapping[str, Sequence[str]], logged: Mapping[str, Mapping[str, Logged]]) -> Recipe:
    """Returns the recipe of the first run if ``rl-accel ab`` wrote this run; else a default recipe for verl or slime."""
    baseline = next(iter(arms))
    folder = Path(starts_of(arms[baseline][0])[0]).resolve().parent
    if (folder / "ab.json").exists():
        recipe = load(folder / "recipe.yaml")
    else:
        names = set().union(*(run.metric_names for logs in logged.values() for run in logs.values()))
        has_rounds = any(name.startswith(METRICS_PREFIX) for name in names)
        metrics = SLIME if SLIME.reward in names else Metrics()
        recipe = Recipe("compare", metrics=metrics, rollout=RolloutSection(has_rounds))
    return replace(recipe, arms={arm: recipe.arms.get(arm, Arm()) for arm in arms}, baseline=baseline)


def _seed_of(path: str) -> int | None:
    """Returns the seed of a run: the number after the last ``seed`` in its path; None without one."""
    seeds = re.findall(r"seed[-_=]?(\d+)", path)
    return int(seeds[-1]) if seeds else None


@click.command(context_settings={"ignore_unknown_options": True})  # otherwise click rejects --against
@click.argument("words", nargs=-1, required=True, metavar="RUN... --against RUN... [--against RUN...]")
@click.option(
    "--out", type=click.Path(path_type=Path), default="out/compare", show_default=True, help="Folder for the report."
)
@click.option("--reward", help="Metric to compare.  [default: critic/score/mean, slime's rollout/raw_reward]")
@click.option(
    "--margin",
    help="Largest difference that counts as equal: a share of the baseline's gain, or a number such as 0.01.  [default: 2%]",
)
@click.option("--batch-size", type=click.IntRange(1), help="Prompts of a step, where the logs do not say.")
def compare(words: Sequence[str], out: Path, batch_size: int | None, **metrics: str | None) -> None:
    """Compare runs that were launched elsewhere. Name the runs of a baseline and, after each --against, the runs of another arm.

    A RUN is a folder or file of verl's file logger or TensorBoard, a FILE.csv exported from W&B, or a console log of verl or slime;
    paths joined by commas are one run that was started several times. Exit code 0: runs were compared, with any result; 2: an input
    cannot be read.
    """
    for word in words:
        if word.startswith("-") and word != "--against":
            options = (name for option in click.get_current_context().command.params for name in option.opts)
            raise click.UsageError(f"No such option: {word}{did_you_mean(word, ('--against', *options))}")
    recipe, runs = gather(
        _arms_of(words), {key: value for key, value in metrics.items() if value is not None}, batch_size
    )
    results = [
        RunResult(
            arm=run.arm,
            seed=run.seed or 0,
            steps_wanted=len(run.steps),
            command=[*run.command],
            env={},
            status="read",
            steps_done=len(run.steps),
            label=run.label,
        )
        for run in runs
    ]
    out.mkdir(parents=True, exist_ok=True)
    summary = report.build(recipe, Path(words[0]), out, results, asked=0, runs=runs)
    report.show(summary, wide_console(report.WIDTH, markup=False, highlight=False))
    click.echo(f"Report: {out / 'report.html'}")


def _arms_of(words: Sequence[str]) -> dict[str, list[str]]:
    """Returns the runs of each arm in ``words``, in which ``--against`` separates the arms. Names the arms by their first runs, and
    by the paths of these if two names are equal.
    """
    sides = [
        [",".join(starts_of(run)) for run in side]
        for is_word, side in itertools.groupby(words, "--against".__eq__)
        if not is_word
    ]
    if len(sides) < 2:
        first, second = [*(word for word in words if word != "--against"), "RUN", "RUN"][:2]
        raise click.UsageError(f"found no second arm: write {first} --against {second}")
    firsts = [side[0] for side in sides]
    names = list(map(_arm_name, firsts))
    if len(set(names)) < len(names):
        names = firsts
    return dict(zip(names, sides, strict=True))


def _arm_name(run: str) -> str:
    """Returns a name for an arm, derived from the path of its first run: "tail" for ``logs/tail-seed1.jsonl``.

    The name is the last part of the path, without seed, number and file suffix. Parts such as ``seed1.jsonl`` of which nothing is
    left are skipped. If no part remains, the name is the path.
    """
    suffix = r"(?:(^|[-_.=]+)(seed|run)?[-_=]*\d+|[-_.=]*seed\d+)?(\.\w+)?$"
    parts = (re.sub(suffix, "", part) for part in reversed(Path(starts_of(run)[0]).parts))
    return next(filter(None, parts), run)
