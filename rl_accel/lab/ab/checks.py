"""Checks of an A/B: conditions of the recipe that the training runs must meet, so that their measurements can be trusted."""

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl_accel.lab.ab.recipe import Recipe
from rl_accel.lab.ab.runner import RunResult
from rl_accel.lab.ab.stats import RunData, gain, pairs, same
from rl_accel.lab.ab.tables import cell_text

_PROBS_DIFF = "training/rollout_probs_diff_max"
_LOSS = "actor/pg_loss"
_NO_PAIR = "no two arms of one seed to compare"
Check = dict[str, Any]
"""Result of one check, for ``summary.json``: ``name``, ``status`` (green, red or skipped), ``detail`` (text with measured values or
problems), ``warn_only`` and ``failed``. A red check that is not ``warn_only`` has failed: the exit code is 1."""
_BOUNDS = {
    "rollout_faster": ("faster", "ratio", operator.ge, ".2fx"),
    "wasted_tokens": ("wasted_tokens", "wasted", operator.le, ".1%"),
    "prompts_lost": ("prompts_lost", "lost", operator.le, ".0f"),
}
"""Checks that compare a number of each arm with a bound. Mapping from check to four values: key of the bounds in the recipe's
section ``rollout``, key of the number in ``summary.json``, comparison that must hold for (number, bound), and number format."""


def run_checks(
    recipe: Recipe,
    results: Sequence[RunResult],
    runs: Sequence[RunData],
    stages: Sequence[Any],
    rollout: Mapping[str, Any] | None,
    convergence: Mapping[str, Any],
    asked: int,
) -> list[Check]:
    """Evaluates all checks that a recipe turns on.

    ``stages``, ``rollout`` and ``convergence`` are sections of ``summary.json``. The user requested ``asked`` runs. ``results`` has
    those that were started, and ``runs`` has those that logged metrics.
    """
    wanted = recipe.checks
    checks = [_completed(results, asked)]
    if wanted.identical:
        checks.append(_identical(recipe, runs))
    if wanted.same_training:
        checks.append(_same_training(recipe, runs))
    if wanted.rollout_probs_diff is not None:
        checks.append(_rollout_probs_diff(wanted.rollout_probs_diff, runs))
    if wanted.reward_gain is not None:
        checks.append(_reward_gain(wanted.reward_gain, recipe.metrics.reward, runs))
    if wanted.faster:
        checks.append(_faster(recipe, stages))
    if rollout:
        checks += _rollout_checks(recipe, rollout, convergence)
    for check in checks:
        check["warn_only"] = check["name"] in wanted.warn_only
        check["failed"] = check["status"] == "red" and not check["warn_only"]
    return checks


def _completed(results: Sequence[RunResult], asked: int) -> Check:
    lines = [(result.status == "done", f"{result.name}: {result.status} ({result.message})") for result in results]
    if len(results) < asked:
        lines.append((False, f"{asked - len(results)} of {asked} runs were not started"))
    return _check("completed", lines, green=f"{asked} of {asked} runs trained all their steps")


def _identical(recipe: Recipe, runs: Sequence[RunData]) -> Check:
    metrics = recipe.checks.identical
    lines = []
    compared = 0
    for (base, other), metric in itertools.product(pairs(runs, recipe.baseline), metrics):
        steps = [s for s in base.steps if metric in base.steps[s] and metric in other.steps.get(s, {})]
        compared += len(steps)
        parted = next((s for s in steps if not same(base.steps[s][metric], other.steps[s][metric])), None)
        text = f"has no step in common with {base.arm}"
        if parted is not None:
            text = f"parts at step {parted}: {base.steps[parted][metric]!r} and {other.steps[parted][metric]!r}"
        lines.append((bool(steps) and parted is None, f"{metric} of {other.arm} seed {other.seed} {text}"))
    green = f"{', '.join(metrics)}: equal in all {compared} comparisons"
    return _check("identical", lines, green=green, skipped=_NO_PAIR)


def _rollout_probs_diff(limit: float, runs: Sequence[RunData]) -> Check:
    values = [(m[_PROBS_DIFF], step, run) for run in runs for step, m in run.steps.items() if _PROBS_DIFF in m]
    lines = []
    if values:
        # NaN means that verl could not compare the probabilities. NaN must not pass as a small difference.
        worst, step, run = max(values, key=lambda item: math.inf if math.isnan(item[0]) else item[0])
        text = f"largest {worst:.3g} ({run.arm} seed {run.seed}, step {step}), allowed {limit:g}"
        lines.append((worst <= limit, text))
    skipped = f"no {_PROBS_DIFF} logged: set rollout.calculate_log_probs=True"
    return _check("rollout_probs_diff", lines, skipped=skipped)


def _reward_gain(least: float, metric: str, runs: Sequence[RunData]) -> Check:
    lines = []
    for run in runs:
        change = gain(run, metric)
        text = f"{change['before']:.3f} to {change['after']:.3f}" if change else f"too few values of {metric}"
        lines.append((change is not None and change["gain"] >= least, f"{run.arm} seed {run.seed}: {text}"))
    return _check("reward_gain", lines, wanted=f"wanted a gain of at least {least:g}")


def _same_training(recipe: Recipe, runs: Sequence[RunData]) -> Check:
    lines = []
    for base, other in pairs(runs, recipe.baseline):
        limit = recipe.checks.same_training.get(other.arm)
        if limit is None:
            continue
        for metric in (recipe.metrics.reward, _LOSS):
            steps = [s for s in base.steps if metric in base.steps[s] and metric in other.steps.get(s, {})]
            differences = [abs(base.steps[s][metric] - other.steps[s][metric]) for s in steps]
            worst = max(differences, default=math.nan)
            text = f"{metric} of {other.name} differs by up to {worst:.2g} in {len(steps)} steps, allowed {limit:g}"
            lines.append((worst <= limit, text))
    return _check("same_training", lines, skipped=_NO_PAIR)


def _faster(recipe: Recipe, stages: Sequence[Any]) -> Check:
    rows = {row["stage"]: row for row in stages}
    whole = recipe.metrics.step
    arms = list(rows.get(whole, {}).get("ratios", {}))
    lines = []
    for name, least in recipe.checks.faster.items():
        stage = whole if name in recipe.arms else name
        for arm in [arm for arm in arms if name in (arm, stage)]:
            ratio = rows.get(stage, {}).get("ratios", {}).get(arm, {}).get("ratio") or 0.0
            text = f"{stage} {ratio:.2f}x ({arm}), wanted {least:g}x"
            if ratio < least and stage == whole:
                text += f": its seconds are {_largest(recipe, stages, arm)}"
            lines.append((ratio >= least, text))
    return _check("faster", lines, skipped=_NO_PAIR)


def _largest(recipe: Recipe, stages: Sequence[Any], arm: str) -> str:
    """Returns a text with the three stages that take the most seconds of a step of ``arm``, which limit its speedup."""
    seconds = {row["stage"]: row["arms"][arm]["mean"] for row in stages if arm in row["arms"]}
    del seconds[recipe.metrics.step]
    largest = sorted(seconds, key=lambda stage: -seconds[stage])[:3]
    return ", ".join(f"{stage} {seconds[stage]:.2f}" for stage in largest)


def _rollout_checks(recipe: Recipe, rollout: Mapping[str, Any], convergence: Mapping[str, Any]) -> Iterator[Check]:
    rows = {row["arm"]: row for row in rollout["arms"]}
    for name, (key, column, holds, form) in _BOUNDS.items():
        bounds: Mapping[str, float] = getattr(recipe.rollout, key)
        lines = []
        skipped = "no such arm was run"
        for arm, bound in bounds.items():
            if column == "ratio" and recipe.baseline not in rows:
                skipped = f"{recipe.baseline} was not run"
            elif arm in rows:  # the option --arms may select only some of the recipe's arms
                value = rows[arm].get(column)
                text = f"{arm} {cell_text(value, form)}, wanted {cell_text(bound, form)}"
                is_good = value is not None and holds(value, bound)
                lines.append((is_good, f"{arm}: not measured" if value is None else text))
        if bounds:
            yield _check(name, lines, skipped=skipped)
    if (limit := recipe.rollout.same_reward) is not None:
        lines = []
        for row in convergence["rows"]:
            if row["metric"] == recipe.metrics.reward and row["axis"] == "steps" and math.isfinite(row["low"]):
                text = f"{row['arm']} {row['difference']:+.3f} ({row['low']:+.3f} to {row['high']:+.3f})"
                lines.append((-limit <= row["low"] and row["high"] <= limit, text))
        skipped = "an interval needs at least three seeds of the baseline and of an arm"
        yield _check("same_reward", lines, wanted=f"wanted the interval within {limit:g}", skipped=skipped)
    if rollout["ledgers"] or rollout["without_ledger"]:
        lines = [(False, f"{run}: tail batching left no ledger") for run in rollout["without_ledger"]]
        for ledger in rollout["ledgers"]:
            if ledger["odd_steps"]:
                lines.append((False, f"{ledger['run']}: steps {ledger['odd_steps']} are no whole batches"))
            for epoch in ledger["epochs"]:
                text = f"{ledger['run']} epoch {epoch['epoch']}: {epoch['once']} of {epoch['prompts']} prompts trained once"
                faults = [f"{epoch[name]} {name}" for name in ("again", "missing", "failed") if epoch[name]]
                lines.append((not faults, ", ".join([text, *faults])))
        yield _check("ledger", lines)


def _check(
    name: str,
    lines: Sequence[tuple[bool, str]],
    wanted: str = "",
    green: str = "",
    skipped: str = "nothing was measured",
) -> Check:
    """Combines several conditions into one check. It is red if any condition does not hold, and skipped if there are none.

    Args:
        lines: a pair per condition: whether it holds, and a text with the measured value.
        wanted: what the recipe demands. A red check shows it after the texts of the conditions that do not hold.
        green: text of a green check; "" for the texts of all conditions.
        skipped: text of a skipped check: the reason.
    """
    status = "green"
    detail = green or "; ".join(text for _, text in lines)
    if bad := [text for holds, text in lines if not holds]:
        status = "red"
        detail = "; ".join([*bad, wanted] if wanted else bad)
    elif not lines:
        status = "skipped"
        detail = skipped
    return {"name": name, "status": status, "detail": detail}
