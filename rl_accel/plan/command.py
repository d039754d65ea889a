"""Command ``rl-accel plan``: predicts the effect of features and alternatives on a run without spending GPU time."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rl_accel.console import finite, refuse_idle_options, say, wide_console
from rl_accel.errors import RlAccelError
from rl_accel.files import strict_json, write_atomically
from rl_accel.plan.answers import answer, options_of
from rl_accel.plan.predict import check_prediction
from rl_accel.plan.published import engine_of_model
from rl_accel.plan.report import Plan
from rl_accel.plan.setup import Setup, setup_of
from rl_accel.rollout.simulation import EngineModel
from rl_accel.rollout.workload import published, read_lengths
from rl_accel.telemetry.profile import WARMUP, read_run
from rl_accel.telemetry.savings import levers

_PUBLISHED = "published:"


def _engine(_: Any, __: Any, value: str | None) -> EngineModel | None:
    """Returns the engine model that ``--step-seconds`` names, as "1:0.02,64:0.04" or "published:MODEL"."""
    if value is None:
        return None
    if value.startswith(_PUBLISHED):
        return engine_of_model(value.removeprefix(_PUBLISHED))
    try:
        points = [point.split(":") for point in value.split(",")]
        return EngineModel({int(running): float(seconds) for running, seconds in points})
    except ValueError as error:
        wanted = "seconds of a step by running requests, as in 1:0.02,64:0.04, or published:qwen2.5-14b"
        raise click.BadParameter(f"wants {wanted}, found {value!r} ({error})") from error


_PATH = click.Path(exists=True, path_type=Path)
_COUNT = click.IntRange(1)


@click.command()
@click.argument("run_dir", metavar="LOG", type=click.Path(path_type=Path), required=False)
@click.option(
    "--lengths",
    help="Instead of LOG: a file or folder of responses of verl or slime, or published:math16k, code16k, judge16k.",
)
@click.option(
    "--tokenizer", help="Tokenizer (name or folder) that counts the texts in --lengths. Default: count characters."
)
@click.option("--prompts", type=_COUNT, help="Prompts per batch (P0).")
@click.option("--responses", type=_COUNT, help="Responses per prompt (R0).")
@click.option("--replicas", type=_COUNT, help="Replicas of the rollout engine.")
@click.option("--slots", type=_COUNT, help="Requests that a replica runs at once (max_num_seqs).")
@click.option("--cache-tokens", type=_COUNT, help="Tokens that the key-value cache of a replica holds.")
@click.option(
    "--step-seconds",
    callback=_engine,
    help="Seconds of a decoding step by running requests, as 1:0.02,64:0.04 or published:MODEL.",
)
@click.option(
    "--other-seconds", type=click.FloatRange(0), callback=finite, help="Seconds of a step outside the rollout."
)
@click.option("--draws", type=_COUNT, default=20, show_default=True, help="Draws of prompts and lengths.")
@click.option("--rounds", type=click.IntRange(5), default=20, show_default=True, help="Rollouts of each draw.")
@click.option(
    "--warmup", type=click.IntRange(0), default=WARMUP, show_default=True, help="First steps of a run to leave out."
)
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of plan.json.  [default: that of LOG]"
)
@click.option(
    "--check", "checked", nargs=2, type=_PATH, metavar="A B", help="Predict run B from run A: how far off was it?"
)
def plan(run_dir: Path | None, lengths: str | None, checked: tuple[Path, Path] | None, **given: Any) -> None:
    """Predicts the rollout and step seconds of your run with each feature, and with alternatives such as more replicas.

    LOG is a run that `rl-accel profile` can read. Engine and lengths are fitted to each response if the run had
    +rl_accel.telemetry.enable=True, otherwise to the means and maxima in the log. Without LOG, give --lengths with
    --step-seconds, --prompts, --responses and --replicas.
    """
    console = wide_console()
    draws, rounds, warmup = given["draws"], given["rounds"], given["warmup"]
    if checked is not None:
        idle = ("run_dir", "lengths", "tokenizer", "step_seconds", "other_seconds", "rounds", "out")
        refuse_idle_options("with --check", *idle)
        check_prediction(*checked, given, console)
        return
    if (run_dir is None) == (lengths is None):
        raise click.UsageError("give LOG, or --lengths with --step-seconds, --prompts, --responses and --replicas")
    run = fit = None
    if run_dir is None:
        setup = _given(str(lengths), given)
    else:
        refuse_idle_options("with LOG", "tokenizer", "step_seconds", "other_seconds")
        run = read_run(run_dir, warmup, given["responses"])
        setup, fit = setup_of(run, given)
    options = options_of(setup)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("draws", total=draws * (len(options) + 1))
        answers = answer(setup, options, draws, rounds, lambda: bars.advance(task))
    result = Plan(setup, fit, answers, f"{draws} draws of {rounds} rollouts.")
    if run is not None:
        say(console, f"{run.log}: {run.logged}", *(f"note: {note}" for note in run.notes))
        result = replace(result, advice=levers(run), preemptions=run.numbers.get("preemptions", 0.0))
    result.show(console)
    path = (given["out"] or (run.output_folder if run else Path())) / "plan.json"
    write_atomically(path, strict_json(result.summary()))
    say(console, f"Written: {path}")


def _given(lengths: str, options: Mapping[str, Any]) -> Setup:
    """Returns the setup that the options of ``rl-accel plan`` describe, for a prediction without a measured run."""
    missing = [name for name in ("prompts", "responses", "replicas", "step_seconds") if not options[name]]
    if missing:
        names = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise RlAccelError(f"--lengths needs {names} as well: lengths say nothing of the engine and the batch")
    if lengths.startswith(_PUBLISHED):
        workload = published(lengths.removeprefix(_PUBLISHED))
    else:
        workload = read_lengths(Path(lengths), options["tokenizer"])
    engine = replace(
        options["step_seconds"], **{key: options[key] for key in ("slots", "cache_tokens") if options[key]}
    )
    stages = {"update_actor": options["other_seconds"]} if options["other_seconds"] else {}
    return Setup(options["prompts"], options["responses"], options["replicas"], engine, workload, stages)
