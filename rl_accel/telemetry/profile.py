"""The command ``rl-accel profile``. Shows the time of a run's training steps in tables and a picture, and estimates savings."""

import contextlib
import functools
import json
import math
import statistics
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from rl_accel.errors import RlAccelError
from rl_accel.features import TailBatchingFlags
from rl_accel.rollout.simulation import EngineModel, ReplayedLengths, play_rounds
from rl_accel.rollout.tail_batching import TailRun
from rl_accel.telemetry import stage_clock
from rl_accel.telemetry.logs import merged, read_log, read_records, unreadable
from rl_accel.telemetry.stage_clock import CANCELLED, COMPLETED, FAILED, FILE_NAME, OTHER, PREFIX, Response

WARMUP = 2
_METRICS = "rl_accel/telemetry/"
_TABLES = {"drafts": "drafted", "balance": "slots_in_use", "skip_zero": "rows"}
"""Features whose metrics are printed in a table, each with the metric that must be above 0 for the table to be printed."""
_PROMPT_RATIO = 1.25
"""Number of prompts that a short round launches, divided by the number of prompts that the round trains.

A short round is a rollout of the feature tail_batching that cuts off slow prompts."""
_LIMIT_SCALE, _LIMIT_SLACK, _LIMIT_LEAST = 1.5, 0.5, 2.0
"""Default time limit of reward_timeout: 1.5 times the longest correct execution plus 0.5 seconds, at least 2 seconds."""

_DRAWN, _TICK = 20_000, 0.001
"""Approximate number of prompts in a simulation of tail_batching, and seconds per tick of the simulated clock."""
_LARGE, _MOST = 0.15, 0.5
"""Shares of a step above which :func:`levers` advises a setting of verl: for ``old_log_prob``, and for generation or training."""

_PARTS = {
    "most_seconds": ("nine in ten responses", "#4878a8"),
    "waiting_seconds": ("waiting for the longest", "#b5498f"),
    "reward_seconds": ("rewards", "#9bc0de"),
    "rest_seconds": ("noticing, storing", "#b7b7a4"),
}
_OTHER_COLOUR = "#d9d9d9"
_LINES = {COMPLETED: "#4878a8", CANCELLED: "#e8a24c", FAILED: "#d1495b", "reward": "#2a9d5c"}
_MOST_ROWS = 2000

_NUMBERS = {
    "idle_share": ("idle share of generation", "{:.1%}"),
    "concurrency": ("most responses at once", "{:,.0f}"),
    "responses": ("responses a step", "{:,.0f}"),
    "cancelled": ("responses cancelled a step", "{:,.0f}"),
    "tokens": ("tokens a step", "{:,.0f}"),
    "preemptions": ("preemptions a step", "{:,.1f}"),
    "completion_p50_seconds": ("a response and its reward, p50", "{:.3g} s"),
    "completion_p90_seconds": ("a response and its reward, p90", "{:.3g} s"),
    "completion_p99_seconds": ("a response and its reward, p99", "{:.3g} s"),
    "completion_longest_seconds": ("the longest", "{:.3g} s"),
}
"""Label and number format of each metric that is printed in a line, by name of the metric."""


@dataclass(frozen=True)
class Saving:
    """A part of a mean training step, and advice that would shorten this part.

    Attributes:
        name: description of the part.
        seconds: duration of the part in a mean step.
        advice: flag or setting that would shorten the part.
        gain: estimated seconds that the advice would save per step; None if unknown.
        arithmetic: explanation of ``gain``, or the reason why ``gain`` is unknown.
    """

    name: str
    seconds: float
    advice: str
    gain: float | None
    arithmetic: str


@dataclass(frozen=True)
class Profile:
    """Time of a run's training steps by stage and cause, and possible savings.

    Attributes:
        log: file with the metrics of the run.
        steps: numbers of the measured steps, which exclude the warm-up steps.
        stages: mean seconds of each stage in a measured step, by name of the stage.
        numbers: means of the metrics of the feature telemetry, by name. Unknown metrics are left out.
        savings: possible savings, sorted by the time of the part, longest first.
        tables: means of the metrics of some features, by feature and by name.
        notes: texts that each say which logged steps are left out and why.
        missing: texts that each say which results are unknown and why.
        responses: responses of each measured step, by step number, if metrics of the step's generation are known. Times are in
            seconds since the first response of the step began.
        kept: responses of all steps, including the warm-up, by step number.
        rests: seconds from the last reward of a step to the end of its generation, by step number.
        on: names of the enabled features.
        last_seconds: seconds of the generation stage in the last step.
    """

    log: Path
    steps: Sequence[int]
    stages: Mapping[str, float]
    numbers: Mapping[str, float]
    savings: Sequence[Saving]
    tables: Mapping[str, Mapping[str, float]]
    notes: Sequence[str]
    missing: Sequence[str]
    responses: Mapping[int, Sequence[Response]]
    kept: Mapping[int, Sequence[Response]]
    rests: Mapping[int, float]
    on: frozenset[str]
    last_seconds: float

    @property
    def last(self) -> Sequence[Response]:
        """Responses of the last measured step; empty if the times of the responses are unknown."""
        return self.responses.get(self.steps[-1], [])

    @property
    def step_seconds(self) -> float:
        """Mean duration of a measured step in seconds."""
        return sum(self.stages.values())


def find_log(folder: Path) -> Path:
    """Returns the only file with the metrics of a verl run in ``folder`` or in its subfolders. ``folder`` may be the file itself.

    Looks for a file of verl's file logger first, and for a file with verl's console output second.

    Raises:
        RlAccelError: there is no such file, or there are several such files. The message names some of these files.
    """
    for pattern in ("*.jsonl", "*.log", "*.out", "*.txt"):
        files = [folder] if folder.is_file() else sorted(path for path in folder.rglob(pattern) if path.is_file())
        logs = [path for path in files if path.name != FILE_NAME and _has_steps(path)]
        logs = [path for path in logs if path.parent == folder] or logs
        if len(logs) == 1:
            return logs[0]
        if logs:
            names = [str(path.relative_to(folder)) for path in logs]
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise RlAccelError(f"{folder} holds the metrics of several runs: give one of {', '.join(names[:4])}{more}")
    raise RlAccelError(
        f"{folder} holds no metrics of a training step of verl: wanted its console output, or what it writes with"
        f" trainer.logger=[console,file]{unreadable(folder)}"
    )


def _has_steps(path: Path) -> bool:
    """True if the file contains metrics of a step with timers. Parses the file only if it contains the prefix of timer names."""
    with path.open(errors="replace") as file:
        might = any("timing_s/" in line or "timing/" in line for line in file)
    return might and any(map(stage_clock.stages, read_log(path).values()))


def read_run(folder: Path, warmup: int = WARMUP) -> Profile:
    """Reads the verl run in ``folder``. Skips the first ``warmup`` steps, but never the last step.

    Raises:
        RlAccelError: ``folder`` contains no run, or more than one run.
        OSError: a file cannot be read.
    """
    log = find_log(folder)
    metrics, restarts = merged(read_records(log))
    staged = {step: seconds for step, logged in metrics.items() if (seconds := stage_clock.stages(logged))}
    steps = list(staged)[min(warmup, len(staged) - 1) :]
    names = [name for name in (*stage_clock.STAGES, OTHER) if any(name in staged[step] for step in steps)]
    stages = {name: statistics.fmean(staged[step].get(name, 0.0) for step in steps) for name in names}
    noted = {step: _below(_METRICS, metrics[step]) for step in steps}
    numbers = _means(noted.values())
    tables = {name: _means([_below(f"rl_accel/{name}/", metrics[step]) for step in steps]) for name in _TABLES}

    notes = [
        f"the run began again at step {step}: what was logged before from there on is left out" for step in restarts
    ]
    timers = [PREFIX + name for name in ("step", *stage_clock.STAGES)]
    if unknown_steps := [
        step for step in metrics if step not in staged and any(name in metrics[step] for name in timers)
    ]:
        notes.append(
            f"left out, as the seconds of a stage or of the step are no numbers: {', '.join(map(str, unknown_steps))}"
        )
    missing: list[str] = []
    kept: dict[int, list[Response]] = {}
    files = sorted((folder if folder.is_dir() else folder.parent).rglob(FILE_NAME))
    if not numbers:
        what = "idle share, waiting, rewards, completion times and preemptions"
        missing.append(f"{what}: the run had no +rl_accel.telemetry.enable=True")
    elif len(files) == 1:
        kept = stage_clock.read_kept(files[0])
    else:
        what = "what tail_batching and reward_timeout would save, the servers, and the picture of responses"
        missing.append(f"{what}: {len(files)} files named {FILE_NAME} are here, not one")
    if numbers and "concurrency" not in numbers:
        missing.append("parts of generation: in this trainer mode responses are under way when the stage begins")
    if unknown := sum("preemptions" not in its for its in noted.values() if its):
        why = "a server's own counter could not be read (vLLM: rollout.disable_log_stats=False)"
        missing.append(f"preemptions of {unknown} of {len(steps)} steps: {why}")

    responses = {step: kept[step] for step, its in noted.items() if "concurrency" in its and step in kept}
    rests = {step: its["rest_seconds"] for step, its in noted.items() if "rest_seconds" in its}
    on = {name.split("/")[1] for name, value in metrics[steps[-1]].items() if name.endswith("/applied") and value}
    savings = _savings(stages, numbers, list(rests.values()), list(responses.values()), on)
    savings += _saving_of_skip_zero(stages, folder if folder.is_dir() else folder.parent, on)
    savings.sort(key=lambda saving: -saving.seconds)
    last_seconds = staged[steps[-1]].get("gen", 0.0)
    return Profile(
        log,
        steps,
        stages,
        numbers,
        savings,
        tables,
        notes,
        missing,
        responses,
        kept,
        rests,
        frozenset(on),
        last_seconds,
    )


def _below(prefix: str, logged: Mapping[str, float]) -> dict[str, float]:
    """Returns the finite metrics whose names start with ``prefix``, by the rest of the name."""
    below = {name.removeprefix(prefix): value for name, value in logged.items() if name.startswith(prefix)}
    return {name: value for name, value in below.items() if math.isfinite(value)}


def _means(of_steps: Collection[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for its in of_steps for name in its)
    return {name: statistics.fmean(its[name] for its in of_steps if name in its) for name in names}


# Savings


def _savings(
    stages: Mapping[str, float],
    numbers: Mapping[str, float],
    rests: Sequence[float],
    steps: Sequence[Sequence[Response]],
    on: set[str],
) -> list[Saving]:
    """Returns the possible savings in a run, sorted by the time of the part, longest first.

    Args:
        stages: mean seconds of each stage in a step.
        numbers: means of the metrics of the feature telemetry, by name.
        rests: seconds from the last reward to the end of generation, one number per step.
        steps: responses of each step for which metrics of generation are known.
        on: names of the enabled features.
    """

    def saving(name: str, seconds: float, estimate: tuple[float | None, str], *features: str) -> Saving:
        if running := sorted(on.intersection(features)):
            return Saving(name, seconds, f"{', '.join(running)}: on", None, "this is what is left of it")
        return Saving(name, seconds, f"+rl_accel.{features[0]}.enable=True", *estimate)

    savings = []
    if "concurrency" in numbers:
        most, waiting, reward, rest = (numbers.get(name, 0.0) for name in _PARTS)
        unknown = "how an engine's speed changes with its requests is not in these numbers"
        advice = "more replicas, or a smaller max_response_length"
        tools = most * numbers.get("tool_share", 0.0)
        savings = [
            saving("waiting for the longest responses", waiting, _gain_of_tail_batching(steps), "tail_batching"),
            saving("rewards after the last generation", reward, _gain_of_reward_timeout(steps), "reward_timeout"),
            saving("noticing that the rollout is done", rest, _gain_of_sampler(rests), "sampler", "tail_batching"),
            Saving("generating nine in ten responses", most - tools, advice, None, unknown),
        ]
        if tools:
            share = f"{numbers['tool_share']:.0%} of a response's time, by verl's own timer of its tool calls"
            hanging = "quicker tools; for those that hang: rl_accel.tail_batching.agent_loop_limit"
            savings.append(Saving("tools of nine in ten responses", tools, hanging, None, share))
    elif stages.get("gen", 0.0) > 0 and not numbers:
        wanted = "+rl_accel.telemetry.enable=True tells how much of it is waiting and which feature would save it"
        advice = ", ".join(name for name in ("sampler", "tail_batching") if name not in on)
        savings = [Saving("generation, waiting included", stages["gen"], advice or "on already", None, wanted)]
    if "reward" in stages:
        needed = "unknown without the time of each reward, which +rl_accel.telemetry.enable=True logs"
        savings.append(saving("rewards", stages["reward"], (None, needed), "reward_timeout"))
    if stages.get("adv", 0.0) > 0:
        has_critic = stages.keys() & {"values", "update_critic"}
        at_most = "at most all of it" + ("; `rl-accel bench gae` measures your shape" if has_critic else "")
        features = ("gae", "advantages") if has_critic else ("advantages", "gae")
        savings.append(saving("advantages", stages["adv"], (None, at_most), *features))
    return sorted(savings, key=lambda saving: -saving.seconds)


def _saving_of_skip_zero(stages: Mapping[str, float], folder: Path, on: Collection[str]) -> list[Saving]:
    """Returns the part of the actor update that trains groups with equal rewards, from verl's ``trainer.rollout_data_dir``."""
    groups: dict[tuple[Path, str], list[tuple[float, int]]] = {}
    for path in folder.rglob("*.jsonl"):
        with contextlib.suppress(KeyError, TypeError, ValueError):  # another file, or a file that is being written
            for row in map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.stem.isdigit() else ()):
                size = len(row["input"]) + len(row["output"])
                groups.setdefault((path, row["input"]), []).append((row["score"], size))
    zero = [group for group in groups.values() if len(group) > 1 and len({score for score, _ in group}) == 1]
    if not zero or "skip_zero" in on or stages.keys() & {"values", "update_critic"}:
        return []
    share = sum(size for group in zero for _, size in group) / sum(size for its in groups.values() for _, size in its)
    seconds = share * stages.get("update_actor", 0.0)
    how = f"{len(zero)} of {len(groups)} groups, {share:.0%} of the text; advantage 0 where rewards are compared in groups"
    return [Saving("training of groups with equal rewards", seconds, "+rl_accel.skip_zero.enable=True", seconds, how)]


def _gain_of_tail_batching(steps: Sequence[Sequence[Response]]) -> tuple[float | None, str]:
    known = [times for responses in steps if (times := prompt_seconds(responses))]
    if not known:
        return None, "no step in which every response completed"
    prompts = max(len(times) for times in known)
    launched = ceil(_PROMPT_RATIO * prompts)
    times = [seconds for step in known for seconds in step]
    as_it_is = statistics.fmean(max(step) for step in known)
    in_rounds = rounds_seconds(times, prompts, launched)
    return max(as_it_is - in_rounds, 0.0), (
        f"{len(times)} prompts' own times, replayed in rounds of {launched} prompts for {prompts} trained, "
        f"the rest in long rounds: {in_rounds:.2f} s a rollout instead of {as_it_is:.2f} s"
    )


def prompt_seconds(responses: Sequence[Response]) -> list[float] | None:
    """Returns one number per prompt: seconds from the start of the step's first response to the last reward of this prompt.

    Returns None without responses. Also returns None if a response was cancelled or failed, because the full time of this response
    is unknown.
    """
    if not responses or any(response.outcome != COMPLETED for response in responses):
        return None
    last: dict[str, float] = {}
    for response in responses:
        last[response.prompt] = max(last.get(response.prompt, 0.0), response.completed_at)
    return list(last.values())


def rounds_seconds(times: Sequence[float], prompts: int, launched: int) -> float:
    """Simulates rollouts with tail batching that train ``prompts`` prompts each. Returns the mean seconds of a rollout.

    A short round is a rollout that launches ``launched`` prompts and defers the slowest prompts to a later rollout. Each prompt
    takes a random time from ``times`` (in seconds). A deferred prompt takes the same time again.
    """
    rounds = min(max(_DRAWN // launched, 100), 2000)
    ticks = np.maximum(np.round(np.random.default_rng(0).choice(times, rounds * launched) / _TICK), 1).astype(int)
    flags = TailBatchingFlags(prompt_ratio=launched / prompts, response_ratio=1.0)
    engine = EngineModel({1: _TICK}, slots=launched)
    played = play_rounds(TailRun(prompts, 1, flags), engine, 1, ReplayedLengths(ticks[:, None]), rounds)
    return statistics.fmean(round.metrics.rollout_seconds for round in played)


def levers(run: Profile) -> list[str]:
    """Returns texts with advice on verl's own settings, which may save more time than the features of rl-accel.

    The advice depends on the share of each stage in a step.
    """
    shares = stage_clock.shares(run.stages)
    found = []
    if shares.get("old_log_prob", 0.0) > _LARGE:
        what = "algorithm.rollout_correction.bypass_mode=True trains with the rollout's own probabilities instead"
        found.append(f"verl: old_log_prob takes {shares['old_log_prob']:.0%} of a step; {what}.")
    training = sum(shares.get(name, 0.0) for name in ("old_log_prob", "ref", "update_actor", "update_critic"))
    if training > _MOST:
        what = "actor_rollout_ref.actor.use_dynamic_bsz=True packs responses of different lengths"
        found.append(f"verl: training takes {training:.0%} of a step; {what}, if it is not on.")
    if shares.get("gen", 0.0) > _MOST and run.numbers.get("preemptions", 0.0) > 0:
        what = "rollout.enable_prefix_caching reads a prompt once for all its responses, enable_chunked_prefill delays others less"
        found.append(
            f"verl: the engines preempt {run.numbers['preemptions']:,.0f} requests a step; {what}, if they are not on."
        )
    return found


def _gain_of_reward_timeout(steps: Sequence[Sequence[Response]]) -> tuple[float | None, str]:
    known = [
        [(r.generated, r.rewarded) for r in responses if r.generated is not None and r.rewarded is not None]
        for responses in steps
    ]
    durations = sorted(end - begin for rewards in known for begin, end in rewards)
    if not durations:
        return None, "no reward was noted"
    nine_in_ten = stage_clock.quantile(durations, 0.9)
    limit = max(_LIMIT_SCALE * nine_in_ten + _LIMIT_SLACK, _LIMIT_LEAST)
    gain = statistics.fmean(
        max(end for _, end in rewards) - max(min(end, begin + limit) for begin, end in rewards)
        for rewards in known
        if rewards
    )
    return gain, (
        f"at most, and for rewards that execute something: rewards replayed with a limit of {limit:.1f} s, which is "
        f"max({_LIMIT_SCALE} x {nine_in_ten:.2f} s (nine in ten take no longer) + {_LIMIT_SLACK} s, {_LIMIT_LEAST} s)"
    )


def _gain_of_sampler(rests: Sequence[float]) -> tuple[float | None, str]:
    if len(rests) < 2:
        return None, "one step alone does not tell polling from the rest"
    mean, shortest = statistics.fmean(rests), min(rests)
    how = f"mean {mean:.2f} s less the shortest of {len(rests)} steps, {shortest:.2f} s, whose poll came in time"
    return mean - shortest, how


# The command


@click.command()
@click.argument("run_dir", type=click.Path(exists=True, path_type=Path))
@click.option("--warmup", type=click.IntRange(0), default=WARMUP, show_default=True, help="First steps to leave out.")
@click.option(
    "--picture", type=click.Path(path_type=Path), help="Where to write the PNG.  [default: RUN_DIR/profile.png]"
)
@click.option("--no-picture", is_flag=True, help="Print only.")
def profile(run_dir: Path, warmup: int, picture: Path | None, no_picture: bool) -> None:
    """Shows where the time of a training step went in the run in RUN_DIR, and which flag would save most.

    RUN_DIR is any folder with the file of verl's file logger, such as a run of `rl-accel ab`. If the run had
    +rl_accel.telemetry.enable=True, the output includes the parts of generation; otherwise only stages.
    """
    console = Console(width=None if sys.stdout.isatty() else 140)
    run = read_run(run_dir, warmup)
    _show(run, console)
    if not no_picture:
        path = picture or (run_dir if run_dir.is_dir() else run_dir.parent) / "profile.png"
        draw(run, path)
        console.print(f"Picture: {path}", markup=False, highlight=False, soft_wrap=True)


def _show(run: Profile, console: Console) -> None:
    say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    span = f"steps {run.steps[0]}-{run.steps[-1]}" if len(run.steps) > 1 else f"step {run.steps[0]}"
    say(f"{run.log}: means of {span}")
    for note in run.notes:
        say(f"note: {note}")
    table = Table("stage", "seconds", "share of the step")
    for column in table.columns[1:]:
        column.justify = "right"
    for stage, share in stage_clock.shares(run.stages).items():
        table.add_row(stage, format_seconds(run.stages[stage]), f"{share:.1%}")
        if stage == "gen":
            for name, (label, _) in _PARTS.items():
                if name in run.numbers:
                    part = run.numbers[name]
                    table.add_row(f"  {label}", format_seconds(part), f"{part / run.step_seconds:.1%}", style="dim")
    table.add_row("step", format_seconds(run.step_seconds), "100.0%", style="bold")
    console.print(table)
    if "responses" in run.numbers:
        for name, (label, _) in _NUMBERS.items():
            say(f"{label + ':':<32}{_shown(run.numbers, name)}")
    servers = sorted({response.server for response in run.last if response.server is not None})
    if len(servers) > 1:
        console.print(_table_of_servers(run, servers))
    for feature, numbers in run.tables.items():
        if numbers.get(_TABLES[feature]):
            table = Table(feature, "mean of a step")
            for name, value in numbers.items():
                if name != "applied":
                    table.add_row(name, f"{value:,.2f}")
            console.print(table)
    for line in run.missing:
        say(f"not known: {line}")
    if run.savings:
        console.print(_table_of_savings(run))
        for saving in run.savings:
            say(f"{saving.name}: {saving.arithmetic}")
        best = max(run.savings, key=lambda saving: (saving.gain or 0.0, saving.seconds))
        if best.gain:
            gain, whole = format_seconds(best.gain), format_seconds(run.step_seconds)
            what = f"Largest saving: {best.name}, {format_seconds(best.seconds)} a step."
            say(f"{what} {best.advice} would save about {gain} of {whole} ({best.gain / run.step_seconds:.0%}).")


def _shown(numbers: Mapping[str, float], name: str) -> str:
    return _NUMBERS[name][1].format(numbers[name]) if name in numbers else "unknown"


def _table_of_servers(run: Profile, servers: Sequence[str]) -> Table:
    table = Table("server", "responses", "tokens", "idle", "longest", title=f"Servers in step {run.steps[-1]}")
    for server in servers:
        its = [response for response in run.last if response.server == server]
        numbers = stage_clock.completion(its) | stage_clock.generation(its, run.last_seconds, began=0.0)
        shown = ("responses", "tokens", "idle_share", "completion_longest_seconds")
        table.add_row(server, *(_shown(numbers, name) for name in shown))
    return table


def _table_of_savings(run: Profile) -> Table:
    columns = ("what takes time", "seconds", "share", "what would reduce it", "gain")
    table = Table(*columns, title="Where it could be saved")
    whole = run.step_seconds
    for saving in run.savings:
        gain = "unknown" if saving.gain is None else f"{format_seconds(saving.gain)} ({saving.gain / whole:.0%})"
        table.add_row(saving.name, format_seconds(saving.seconds), f"{saving.seconds / whole:.1%}", saving.advice, gain)
    return table


def format_seconds(value: float) -> str:
    """Returns a duration, given in seconds, as text with three significant figures, in s or ms."""
    return f"{value:.3g} s" if value >= 0.1 else f"{value * 1000:.3g} ms"


# The picture


def draw(run: Profile, path: Path) -> None:
    """Writes a picture of ``run`` to ``path``: stages of a mean step, parts of generation, and responses of the last step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.6 if run.last else 1.9), layout="constrained")
    heights = [1.1, 3] if run.last else [1]
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part in axes:
        part.spines[["top", "right"]].set_visible(False)
    _draw_bars(axes[0], run)
    if run.last:
        _draw_responses(axes[1], run)
    figure.savefig(path, dpi=120, facecolor="white")


def _draw_bars(axes: Any, run: Profile) -> None:
    """Draws a bar with the stages of a mean step and, below this bar, a bar with the parts of generation."""
    rows = {
        "step": [(name, seconds, stage_clock.STAGES.get(name, _OTHER_COLOUR)) for name, seconds in run.stages.items()]
    }
    parts = [(label, run.numbers[name], colour) for name, (label, colour) in _PARTS.items() if name in run.numbers]
    if parts:
        rows["generation"] = parts
    for place, row in enumerate(rows.values()):
        left = 0.0
        for label, seconds, colour in row:
            axes.barh(place, seconds, left=left, height=0.7, color=colour, edgecolor="white", lw=0.5)
            # A bar too narrow for its label goes into the legend; a character takes a little more than 1% of the width.
            if seconds > 0.015 * len(label) * run.step_seconds:
                axes.text(left + seconds / 2, place, label, ha="center", va="center", fontsize=8)
            elif seconds > 0.003 * run.step_seconds:
                axes.barh(place, 0, color=colour, label=label)
            left += max(seconds, 0.0)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlim(0, run.step_seconds * 1.01)
    idle = f", generation {run.numbers['idle_share']:.0%} idle" if "idle_share" in run.numbers else ""
    axes.set_title(f"Mean of steps {run.steps[0]}-{run.steps[-1]}: {run.step_seconds:.2f} s{idle}", fontsize=10)
    axes.set_xlabel("seconds")
    axes.tick_params(axis="y", length=0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1.1))


def _draw_responses(axes: Any, run: Profile) -> None:
    """Draws a horizontal line per response: generation, then reward. If there are too many responses, draws every k-th response."""
    responses = sorted(run.last, key=lambda r: (r.ended, r.began))
    for place, response in enumerate(responses[:: len(responses) // _MOST_ROWS + 1]):
        end = response.ended if response.generated is None else response.generated
        colour = _LINES[response.outcome]
        axes.plot([response.began, end], [place, place], color=colour, lw=1.2, solid_capstyle="butt")
        if response.rewarded is not None:
            axes.plot([end, response.rewarded], [place, place], color=_LINES["reward"], lw=1.2)
    for label, colour in _LINES.items():
        axes.plot([], [], color=colour, label=label)
    axes.axvline(run.last_seconds, color="black", lw=0.8, ls=":", label="end of the stage")
    axes.set_xlim(0, run.last_seconds * 1.01)
    axes.set_title(f"Responses of step {run.steps[-1]}, in the order in which they ended", fontsize=10)
    axes.set_xlabel("seconds since the first response began")
    axes.set_ylabel("responses")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
