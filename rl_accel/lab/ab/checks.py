"""The checks of a recipe: what must hold in the runs before their numbers mean anything."""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_accel.lab.ab.recipe import Recipe
from rl_accel.lab.ab.runner import RunResult
from rl_accel.lab.ab.stats import RunData, gain

GREEN, RED, SKIPPED = "green", "red", "skipped"
_PROBS_DIFF = "training/rollout_probs_diff_max"


@dataclass(frozen=True)
class Check:
    """The result of one check; a red one makes the exit code 1 unless it is only a warning."""

    name: str
    status: str
    detail: str
    warn_only: bool = False

    @property
    def failed(self) -> bool:
        return self.status == RED and not self.warn_only


def run_checks(
    recipe: Recipe,
    results: Sequence[RunResult],
    runs: Sequence[RunData],
    stages: Sequence[Any],
    rollout: Mapping[str, Any] | None,
    out: Path,
    asked: int,
) -> list[Check]:
    """Evaluate every check of the recipe. ``asked`` is how many runs the call wanted; ``stages`` and ``rollout`` are the
    summary's."""
    checks = [
        _completed(results, asked),
        _identical(recipe, runs),
        _rollout_probs_diff(recipe, runs),
        _first_step_zero(recipe, runs),
        _forbidden_log(recipe, results, out),
        _reward_gain(recipe, runs),
        _faster(recipe, stages),
        *(_rollout_checks(recipe, rollout) if rollout else []),
    ]
    return [Check(**{**asdict(c), "warn_only": c.name in recipe.checks.warn_only}) for c in checks if c is not None]


def _completed(results: Sequence[RunResult], asked: int) -> Check:
    bad = [f"{r.name}: {r.status} ({r.message})" for r in results if r.status != "done"]
    if len(results) < asked:
        bad.append(f"{asked - len(results)} of {asked} runs were not started")
    return _check("completed", bad, f"{asked} of {asked} runs trained all their steps")


def _identical(recipe: Recipe, runs: Sequence[RunData]) -> Check | None:
    if not recipe.checks.identical:
        return None
    bad, steps_seen = [], 0
    couples = list(pairs(runs, recipe.baseline))
    if not couples:
        return Check("identical", SKIPPED, "no two arms of one seed to compare")
    for base, other in couples:
        for metric in recipe.checks.identical:
            steps = [s for s in base.steps if metric in base.steps[s] and metric in other.steps.get(s, {})]
            steps_seen += len(steps)
            if not steps:
                bad.append(f"{metric} of {other.arm} seed {other.seed} has no step in common with {base.arm}")
            parted = [s for s in steps if not _equal(base.steps[s][metric], other.steps[s][metric])]
            if parted:
                a, b = base.steps[parted[0]][metric], other.steps[parted[0]][metric]
                bad.append(f"{metric} of {other.arm} seed {other.seed} parts at step {parted[0]}: {a!r} and {b!r}")
    return _check("identical", bad, f"{', '.join(recipe.checks.identical)}: equal in all {steps_seen} comparisons")


def _rollout_probs_diff(recipe: Recipe, runs: Sequence[RunData]) -> Check | None:
    limit = recipe.checks.rollout_probs_diff
    if limit is None:
        return None
    values = [(m[_PROBS_DIFF], step, run) for run in runs for step, m in run.steps.items() if _PROBS_DIFF in m]
    if not values:
        text = f"no {_PROBS_DIFF} logged: set rollout.calculate_log_probs=True"
        return Check("rollout_probs_diff", SKIPPED, text)
    # a NaN says that verl could not compare, which must not pass as a small number
    worst, step, run = max(values, key=lambda item: math.inf if math.isnan(item[0]) else item[0])
    text = f"largest {worst:.3g} ({run.arm} seed {run.seed}, step {step}), allowed {limit:g}"
    return Check("rollout_probs_diff", GREEN if worst <= limit else RED, text)


def _first_step_zero(recipe: Recipe, runs: Sequence[RunData]) -> Check | None:
    if not recipe.checks.first_step_zero:
        return None
    bad, seen = [], []
    for run in runs:
        for metric in recipe.checks.first_step_zero:
            logged = [(step, m[metric]) for step, m in run.steps.items() if step >= 1 and metric in m]
            if logged:
                step, value = logged[0]
                seen.append(f"{metric} of {run.arm} seed {run.seed} is {value:.3g} at step {step}")
                if not abs(value) <= recipe.checks.zero_tolerance:
                    bad.append(seen[-1])
    if not seen:
        return Check("first_step_zero", SKIPPED, f"none of {', '.join(recipe.checks.first_step_zero)} was logged")
    return _check("first_step_zero", bad, "; ".join(seen))


def _forbidden_log(recipe: Recipe, results: Sequence[RunResult], out: Path) -> Check | None:
    if not recipe.checks.forbidden_log:
        return None
    bad = []
    for result in results:
        for number, line in _lines(out / result.name / "train.log"):
            hit = next((text for text in recipe.checks.forbidden_log if text in line), None)
            if hit is not None:
                bad.append(f"{result.name}/train.log line {number}: {line.strip()[:200]}")
                break
    return _check("forbidden_log", bad, f"no log holds {', '.join(map(repr, recipe.checks.forbidden_log))}")


def _reward_gain(recipe: Recipe, runs: Sequence[RunData]) -> Check | None:
    wanted = recipe.checks.reward_gain
    if wanted is None:
        return None
    bad: list[str] = []
    good: list[str] = []
    for run in runs:
        change = gain(run, recipe.metrics.reward)
        if change is None:
            bad.append(f"{run.arm} seed {run.seed}: too few values of {recipe.metrics.reward}")
            continue
        text = f"{run.arm} seed {run.seed}: {change['before']:.3f} to {change['after']:.3f}"
        (good if change["gain"] >= wanted else bad).append(text)
    return _check("reward_gain", bad, "; ".join(good), f"wanted a gain of at least {wanted:g}")


def _faster(recipe: Recipe, stages: Sequence[Any]) -> Check | None:
    if not recipe.checks.faster:
        return None
    rows = {row["stage"]: row["ratios"] for row in stages}
    arms = rows.get(recipe.metrics.step, {})
    if not arms:
        return Check("faster", SKIPPED, "no two arms of one seed to compare")
    bad: list[str] = []
    good: list[str] = []
    for stage, wanted in recipe.checks.faster.items():
        for arm in arms:
            ratio = rows.get(stage, {}).get(arm, {}).get("ratio") or 0.0
            (good if ratio >= wanted else bad).append(f"{stage} {ratio:.2f}x ({arm}), wanted {wanted:g}x")
    return _check("faster", bad, "; ".join(good))


def _rollout_checks(recipe: Recipe, rollout: Mapping[str, Any]) -> Iterator[Check]:
    wanted, rows = recipe.rollout, {row["arm"]: row for row in rollout["arms"]}
    if wanted.faster and recipe.baseline not in rows:
        yield Check("rollout_faster", SKIPPED, f"{recipe.baseline} was not run")
    elif wanted.faster:
        yield _bounds("rollout_faster", wanted.faster, rows, "ratio", operator.ge, "{:.2f}x")
    if wanted.wasted_tokens:
        yield _bounds("wasted_tokens", wanted.wasted_tokens, rows, "wasted", operator.le, "{:.1%}")
    if wanted.prompts_lost:
        yield _bounds("prompts_lost", wanted.prompts_lost, rows, "lost", operator.le, "{:.0f}")
    if wanted.same_reward is not None:
        yield _same_reward(wanted.same_reward, rows)
    if rollout["ledgers"] or rollout["without_ledger"]:
        bad = [f"{run}: tail batching left no ledger" for run in rollout["without_ledger"]]
        good: list[str] = []
        for ledger in rollout["ledgers"]:
            bad += [f"{ledger['run']}: steps {ledger['odd_steps']} are no whole batches"] if ledger["odd_steps"] else []
            for epoch in ledger["epochs"]:
                text = f"{ledger['run']} epoch {epoch['epoch']}: {epoch['once']} of {epoch['prompts']} prompts trained once"
                faults = [f"{epoch[name]} {name}" for name in ("again", "missing", "failed") if epoch[name]]
                (bad if faults else good).append(", ".join([text, *faults]))
        yield _check("ledger", bad, "; ".join(good))


def _bounds(
    name: str,
    wanted: Mapping[str, float],
    rows: Mapping[str, Any],
    key: str,
    holds: Callable[[float, float], bool],
    form: str,
) -> Check:
    bad: list[str] = []
    good: list[str] = []
    for arm, bound in wanted.items():
        if arm not in rows:  # left out with --arms
            continue
        value = rows[arm].get(key)
        if value is None:
            bad.append(f"{arm}: not measured")
        else:
            text = f"{arm} {form.format(value)}, wanted {form.format(bound)}"
            (good if holds(value, bound) else bad).append(text)
    return _check(name, bad, "; ".join(good)) if bad or good else Check(name, SKIPPED, "no such arm was run")


def _same_reward(bound: float, rows: Mapping[str, Any]) -> Check:
    rewards = {arm: row["reward"] for arm, row in rows.items() if row["reward"] and row["reward"]["low"] is not None}
    if not rewards:
        return Check("same_reward", SKIPPED, "an interval needs at least three seeds of the baseline and of an arm")
    bad: list[str] = []
    good: list[str] = []
    for arm, reward in rewards.items():
        text = f"{arm} {reward['difference']:+.3f} ({reward['low']:+.3f} to {reward['high']:+.3f})"
        (good if -bound <= reward["low"] and reward["high"] <= bound else bad).append(text)
    return _check("same_reward", bad, "; ".join(good), f"wanted the interval within {bound:g}")


def pairs(runs: Sequence[RunData], baseline: str) -> Iterator[tuple[RunData, RunData]]:
    """Yield (baseline run, other run) for each run that has a baseline run of the same seed."""
    base = {run.seed: run for run in runs if run.arm == baseline}
    for run in runs:
        if run.arm != baseline and run.seed in base:
            yield base[run.seed], run


def _check(name: str, bad: Sequence[str], good: str, wanted: str = "") -> Check:
    if not bad:
        return Check(name, GREEN, good)
    return Check(name, RED, "; ".join([*bad, *([wanted] if wanted else [])]))


def _equal(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _lines(log: Path) -> Iterator[tuple[int, str]]:
    try:
        with log.open(errors="replace") as file:
            yield from enumerate(file, 1)
    except OSError:
        return
