"""Command ``rl-accel plan``: predicts the effect of features on a run without spending GPU time."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from rl_accel.console import finite, refuse_idle_options, say, wide_console
from rl_accel.errors import RlAccelError
from rl_accel.files import strict_json, write_atomically
from rl_accel.plan.answers import Answer, answer, best_of, options_of
from rl_accel.plan.fit import Fit
from rl_accel.plan.profile_report import batch_lines
from rl_accel.plan.savings import NOTHING_HELPS, bound_of, levers
from rl_accel.plan.setup import Setup, setup_of
from rl_accel.rollout.simulation import EngineModel
from rl_accel.rollout.workload import read_lengths
from rl_accel.telemetry.profile import WARMUP, Profile, format_seconds, read_run

SCHEMA = "rl_accel.plan/4"
FIT_LIMIT = 0.5
"""Relative error of the fitted engine model above which the output warns that the plan cannot be trusted."""
_COLUMNS: Mapping[str, Callable[[Answer], str]] = {
    "": lambda a: a.option.name,
    "rollout": lambda a: format_seconds(a.outcome.rollout_seconds),
    "step": lambda a: format_seconds(a.outcome.step_seconds),
    "times less": lambda a: "nothing" if a.is_nothing and a.ratio.mean >= 1 else f"{a.ratio.mean:.2f}",
    "95% interval": lambda a: f"{a.ratio.low:.2f} to {a.ratio.high:.2f}",
    "wasted": lambda a: f"{a.outcome.wasted:.0%}" if a.outcome.wasted > 0.0005 else "",
}
_COUNT = click.IntRange(1)


def _engine(_: Any, __: Any, value: str | None) -> EngineModel | None:
    """Returns the engine model for a value of ``--step-seconds``, such as "1:0.02,64:0.04"."""
    if value is None:
        return None
    try:
        points = [point.split(":") for point in value.split(",")]
        return EngineModel({int(running): float(seconds) for running, seconds in points})
    except ValueError as error:
        wanted = "seconds of a step by running requests, as in 1:0.02,64:0.04"
        raise click.BadParameter(f"wants {wanted}, found {value!r} ({error})") from error


@click.command()
@click.argument("run_dir", metavar="LOG", type=click.Path(path_type=Path), required=False)
@click.option("--lengths", help="Instead of LOG: a file or folder of responses of verl or slime.")
@click.option(
    "--tokenizer", help="Tokenizer (name or folder) that counts the texts in --lengths. Default: count characters."
)
@click.option("--prompts", type=_COUNT, help="Prompts per batch.")
@click.option("--responses", type=_COUNT, help="Responses per prompt.")
@click.option("--replicas", type=_COUNT, help="Replicas of the rollout engine.")
@click.option("--slots", type=_COUNT, help="Requests that a replica runs at once (max_num_seqs).")
@click.option("--cache-tokens", type=_COUNT, help="Tokens that the key-value cache of a replica holds.")
@click.option(
    "--step-seconds", callback=_engine, help="Seconds of a decoding step by running requests, as 1:0.02,64:0.04."
)
@click.option(
    "--other-seconds", type=click.FloatRange(0), callback=finite, help="Seconds of a step beside the rollout."
)
@click.option("--draws", type=_COUNT, default=20, show_default=True, help="Draws of prompts and lengths.")
@click.option("--rounds", type=click.IntRange(5), default=20, show_default=True, help="Rollouts of each draw.")
@click.option("--warmup", type=click.IntRange(0), default=WARMUP, show_default=True, help="First steps to leave out.")
@click.option("--out", type=click.Path(path_type=Path), default=".", show_default=True, help="Folder of plan.json.")
def plan(run_dir: Path | None, lengths: str | None, **given: Any) -> None:
    """Predicts the rollout and step seconds of your run with each feature.

    LOG is a run that had +rl_accel.telemetry.enable=True: engine and lengths are fitted to its responses. Of any other log you get
    an upper bound. Without LOG, give --lengths with --step-seconds, --prompts, --responses and --replicas.
    """
    console = wide_console()
    if (run_dir is None) == (lengths is None):
        raise click.UsageError("give LOG, or --lengths with --step-seconds, --prompts, --responses and --replicas")
    run = None
    fit = None
    if run_dir is None:
        setup = _given(str(lengths), given)
    else:
        refuse_idle_options("with LOG", "tokenizer", "step_seconds", "other_seconds")
        run = read_run(run_dir, given["warmup"], given["prompts"], given["responses"])
        say(console, f"{run.log}: {run.logged}", *batch_lines(run))
        if not run.responses and run.tail_bound is not None:
            say(console, *_bound_lines(run, run.tail_bound))
            return
        setup, fit = setup_of(run, given)
    options = list(options_of(setup))
    draws = given["draws"]
    rounds = given["rounds"]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("draws", total=draws * (len(options) + 1))
        answers = answer(setup, options, draws, rounds, lambda: bars.advance(task))
    basis = [f"{draws} draws of {rounds} rollouts.", *basis_lines(setup, fit)]
    preemptions = run.numbers.get("preemptions", 0.0) if run else 0.0
    conclusions = [*conclusion_lines(setup, fit, answers, preemptions), *(levers(run) if run else ())]
    table = Table(*_COLUMNS, title="What it would do to a step")
    for row in answers:
        table.add_row(*(cell(row) for cell in _COLUMNS.values()))
    say(console, *basis)
    console.print(table)
    for option in options:
        say(console, f"{option.name}: {'; '.join(filter(None, (option.cost, option.how)))}")
    say(console, *conclusions)
    path = given["out"] / "plan.json"
    stock, *others = map(_row, answers)
    summary = {
        "schema": SCHEMA,
        "basis": basis,
        "engine": asdict(setup.engine),
        "stages": dict(setup.stages),
        "stock": stock,
        "answers": others,
        "conclusions": conclusions,
    }
    write_atomically(path, strict_json(summary))
    say(console, f"Written: {path}")


def _bound_lines(run: Profile, bound: float) -> Iterator[str]:
    """Yields what a log without response times tells: an upper bound, and what a simulation needs."""
    share = f"{bound / run.step_seconds:.0%} of {format_seconds(run.step_seconds)}"
    yield f"tail_batching would save at most {format_seconds(bound)} of generation ({share}), {bound_of(run)}."
    needed = "a run with +rl_accel.telemetry.enable=True, or --lengths with the lengths of its responses"
    if run.logged.is_slime:
        needed = "--lengths with the folder of --save-debug-rollout-data"
    yield f"The time of each response is not in this log, so that nothing is simulated: that needs {needed}."


def _given(lengths: str, options: Mapping[str, Any]) -> Setup:
    """Returns the setup for ``rl-accel plan --lengths``, without a measured run. ``options`` are those of the command, by name."""
    missing = [name for name in ("prompts", "responses", "replicas", "step_seconds") if not options[name]]
    if missing:
        names = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise RlAccelError(f"--lengths needs {names} as well: lengths say nothing of the engine and the batch")
    folder = Path(lengths)
    saved_by_slime = folder.is_dir() and not any(folder.glob("*.jsonl"))
    limits = {key: options[key] for key in ("slots", "cache_tokens") if options[key]}
    return Setup(
        prompts=options["prompts"],
        responses=options["responses"],
        replicas=options["replicas"],
        engine=replace(options["step_seconds"], **limits),
        workload=read_lengths(folder, options["tokenizer"]),
        stages={"update_actor": options["other_seconds"]} if options["other_seconds"] else {},
        is_slime=saved_by_slime,
    )


def basis_lines(setup: Setup, fit: Fit | None) -> Iterator[str]:
    """Yields sentences about the inputs of the plan: batch size, response lengths and engine speed."""
    tokens = setup.workload.tokens
    replicas = "1 replica" if setup.replicas == 1 else f"{setup.replicas} replicas"
    yield f"{setup.prompts} prompts of {setup.responses} responses on {replicas}."
    half, most, longest = (f"{int(tokens[int(share * (len(tokens) - 1))]):,}" for share in (0.5, 0.9, 1))
    lengths = f"mean {tokens.mean():,.0f} tokens, median {half}, nine in ten below {most}, the longest {longest}"
    alike = f"intraclass correlation within a prompt {setup.workload.alike:.2f}"
    yield f"Lengths: {lengths}; {alike}. From {setup.workload.source}."
    steps = ", ".join(f"{format_seconds(s)} with {n:,}" for n, s in sorted(setup.engine.step_seconds.items()))
    yield f"A decoding step takes {steps} running requests."
    if fit is not None:
        yield f"Fitted to {fit.responses:,} responses, error {fit.error:.1%} of their seconds."
    if not setup.stages:
        yield "A step is its rollout here: --other-seconds says what else it does."


def conclusion_lines(setup: Setup, fit: Fit | None, answers: Sequence[Answer], preemptions: float) -> Iterator[str]:
    """Yields sentences for the end of the output: best feature, useless features, and warnings.

    ``answers`` are those of the unchanged run and of each option. ``preemptions`` is the measured number per step; 0 if unknown.
    """
    stock, *priced = answers
    if fit is not None and fit.error > FIT_LIMIT:
        why = "--slots and --cache-tokens say how many requests run at once and what they may take"
        yield f"Do not trust this plan: the fitted engine is {fit.error:.0%} off for a response; {why}."
    if preemptions and setup.engine.cache_tokens == math.inf:
        how = "--cache-tokens, which vLLM logs as the size of its KV cache, has them preempt here as well"
        yield f"The engines preempted {preemptions:,.0f} requests a step: {how}."
    best = best_of(priced)
    if best is None:
        yield NOTHING_HELPS
    else:
        before, after = (format_seconds(answer.outcome.step_seconds) for answer in (stock, best))
        ratio = f"{best.ratio.mean:.2f} times less, {best.ratio.low:.2f} to {best.ratio.high:.2f}"
        yield f"Best of the pack: {best.option.name}. A step of {before} would take {after} ({ratio})."
        yield f"Set {best.option.how}"
    if none := [answer.option.name for answer in priced if answer.is_nothing]:
        yield f"Nothing to gain from: {', '.join(none)}."


def _row(answer: Answer) -> dict[str, Any]:
    """Returns the content of ``plan.json`` for one answer."""
    option = answer.option
    names = {"name": option.name, "set": option.how, "cost": option.cost}
    ratio = {"ratio": answer.ratio.mean, "low": answer.ratio.low, "high": answer.ratio.high}
    return {**names, **asdict(answer.outcome), **ratio, "nothing": answer.is_nothing}
