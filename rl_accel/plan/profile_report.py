"""The command ``rl-accel profile``: prints where the time of a run's training steps went, and draws a picture of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from rl_accel.console import refuse_idle_options, say, wide_console
from rl_accel.errors import RlAccelError
from rl_accel.plan.answers import SMALLEST_GAIN
from rl_accel.plan.savings import NOTHING_HELPS, Saving, find_savings, levers
from rl_accel.telemetry import stage_clock
from rl_accel.telemetry.profile import PARTS, WARMUP, Profile, format_seconds, read_run

_TABLES = {"drafts": "drafted", "skip_zero": "rows"}
"""Mapping from each feature whose metrics the report prints as a table to the metric that is 0 if the feature did nothing."""
_NOT_ESTIMATED = (
    "not in these numbers: final_output (host seconds of vLLM for each token), and drafts (text that responses share)"
)
_NEEDS_V1 = "The flags act in the V1 trainer of verl 0.9, which did not write this log."
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
"""Metrics of telemetry that the report prints, each with its label and number format."""


@click.command()
@click.argument("run_dir", metavar="LOG", type=click.Path(path_type=Path))
@click.option("--warmup", type=click.IntRange(0), default=WARMUP, show_default=True, help="First steps to leave out.")
@click.option(
    "--picture", type=click.Path(path_type=Path), default="profile.png", show_default=True, help="Picture file."
)
@click.option("--no-picture", is_flag=True, help="Print only.")
@click.option("--prompts", type=click.IntRange(1), help="Prompts per batch, if the log does not say.")
@click.option("--responses", type=click.IntRange(1), help="Responses per prompt (rollout.n), if the log does not say.")
def profile(
    run_dir: Path, warmup: int, picture: Path, no_picture: bool, prompts: int | None, responses: int | None
) -> None:
    """Shows where the time of a training step went in a run, and which flag would save most.

    LOG is a folder or a file: what verl or slime printed, verl's file logger, TensorBoard or W&B's CSV. Files joined by commas are
    one run. If the run had +rl_accel.telemetry.enable=True, the parts of generation are measured; otherwise the report
    has upper bounds.
    """
    console = wide_console(140)
    if no_picture:
        refuse_idle_options("with --no-picture", "picture")
    run = read_run(run_dir, warmup, prompts, responses)
    _show(run, console)
    if not no_picture:
        path = picture / "profile.png" if picture.is_dir() else picture
        path = path.with_suffix(path.suffix or ".png")
        try:
            draw_profile(run, path)
        except ValueError as error:  # matplotlib does not know the suffix
            raise RlAccelError(f"{path} is no picture: {error}") from error
        say(console, f"Picture: {path}")


def _show(run: Profile, console: Console) -> None:
    span = f"steps {run.steps[0]}-{run.steps[-1]}" if len(run.steps) > 1 else f"step {run.steps[0]}"
    say(console, f"{run.log}: {run.logged}", f"Means of {span}", *batch_lines(run))
    console.print(_table_of_stages(run))
    if "responses" in run.numbers:
        say(console, *(f"{label + ':':<32}{_shown(run.numbers, name)}" for name, (label, _) in _NUMBERS.items()))
    for feature, needed in _TABLES.items():
        numbers = run.table(feature)
        if numbers.get(needed):
            table = Table(feature, "mean of a step")
            for name, value in numbers.items():
                if name != "applied":
                    table.add_row(name, f"{value:,.2f}")
            console.print(table)
    for line in run.missing:
        say(console, f"not known: {line}")
    if run.logged.is_mixed:
        return
    savings = find_savings(run)
    if savings:
        console.print(_table_of_savings(savings, run.step_seconds))
        say(console, *(f"{saving.name}: {saving.arithmetic}" for saving in savings))
    if savings and not run.logged.is_slime:
        say(console, _NOT_ESTIMATED if run.is_v1 else _NEEDS_V1)
    say(console, *levers(run), _conclusion(savings, run.step_seconds))


def batch_lines(run: Profile) -> list[str]:
    """Returns the notes on a run, and a line with the size of its batch and the lengths of its responses, if they are known."""
    facts = []
    prompts, responses = run.logged.batch
    if prompts and responses:
        facts.append(f"{prompts:,} prompts of {responses:,} responses")
    if run.lengths is not None:
        mean, longest = run.lengths
        facts.append(f"response lengths: mean {mean:,.0f} tokens, longest {longest:,.0f}")
    lines = [f"note: {note}" for note in run.notes]
    return [*lines, "; ".join(facts)] if facts else lines


def _table_of_stages(run: Profile) -> Table:
    table = Table("stage", "seconds", "share of the step")
    for column in table.columns[1:]:
        column.justify = "right"
    for stage, share in stage_clock.shares(run.stages).items():
        table.add_row(stage, format_seconds(run.stages[stage]), f"{share:.1%}")
        if stage == "gen":
            for name, seconds in run.parts.items():
                label, _ = PARTS[name]
                table.add_row(f"  {label}", format_seconds(seconds), f"{seconds / run.step_seconds:.1%}", style="dim")
    table.add_row("step", format_seconds(run.step_seconds), "100.0%", style="bold")
    if run.validations:
        count = len(run.validations)
        times = "once" if count == 1 else f"{count} times"
        mean = sum(run.validations) / count
        table.add_row("validation", format_seconds(mean), f"{times}, no part of a step")
    return table


def _conclusion(savings: Sequence[Saving], step_seconds: float) -> str:
    """Returns the last sentence of the report: the largest possible saving, or that no feature would help."""
    best = savings[0] if savings else None
    if best is None or not best.ours or best.largest < SMALLEST_GAIN * step_seconds:
        return NOTHING_HELPS
    gain = f"{format_seconds(best.largest)} of {format_seconds(step_seconds)} ({best.largest / step_seconds:.0%})"
    if best.gain is not None:
        what = f"{best.name}, {format_seconds(best.seconds)} a step"
        return f"Largest saving: {what}. {best.advice} would save about {gain}."
    return f"Largest part that may be saved: {best.name}, at most {gain}, by {best.advice}."


def _shown(numbers: Mapping[str, float], name: str) -> str:
    return _NUMBERS[name][1].format(numbers[name]) if name in numbers else "unknown"


def _table_of_savings(savings: Sequence[Saving], whole: float) -> Table:
    columns = ("what takes time, and what would reduce it", "seconds", "share", "gain, with 95% interval")
    table = Table(*columns, title="Where it could be saved")
    table.columns[0].no_wrap = True  # a terminal of 80 columns shows flags in one piece
    for saving in savings:
        share = f"{saving.seconds / whole:.1%}" if saving.in_step else ""
        seconds = format_seconds(saving.seconds)
        table.add_row(f"{saving.name}\n  {saving.advice}", seconds, share, _gain_text(saving, whole))
    return table


def _gain_text(saving: Saving, whole: float) -> str:
    if saving.gain is not None:
        mean, low, high = map(format_seconds, (saving.gain.mean, saving.gain.low, saving.gain.high))
        return f"{mean} ({saving.gain.mean / whole:.0%}), {low} to {high}"
    if saving.at_most is not None:
        return f"at most {format_seconds(saving.at_most)} ({saving.at_most / whole:.0%})"
    return "unknown"


def draw_profile(run: Profile, path: Path) -> None:
    """Writes a picture of ``run`` to ``path``: a bar with the stages of a mean step, and a bar with the parts of generation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.9), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    rows = {
        "step": [(name, seconds, stage_clock.STAGES.get(name, "#d9d9d9")) for name, seconds in run.stages.items()],
        "generation": [
            (label, run.parts[name], colour) for name, (label, colour) in PARTS.items() if name in run.parts
        ],
    }
    rows = {name: segments for name, segments in rows.items() if segments}
    for row, segments in enumerate(rows.values()):
        start = 0.0
        for label, seconds, colour in segments:
            axes.barh(row, seconds, left=start, height=0.7, color=colour, edgecolor="white", lw=0.5)
            # A bar too narrow for its label goes into the legend; a character takes a little more than 1% of the width.
            if seconds > 0.015 * len(label) * run.step_seconds:
                axes.text(start + seconds / 2, row, label, ha="center", va="center", fontsize=8)
            elif seconds > 0.003 * run.step_seconds:
                axes.barh(row, 0, color=colour, label=label)
            start += max(seconds, 0.0)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlim(0, run.step_seconds * 1.01)
    idle = f", generation {run.numbers['idle_share']:.0%} idle" if "idle_share" in run.numbers else ""
    axes.set_title(f"Mean of steps {run.steps[0]}-{run.steps[-1]}: {run.step_seconds:.2f} s{idle}", fontsize=10)
    axes.set_xlabel("seconds")
    axes.tick_params(axis="y", length=0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1.1))
    figure.savefig(path, dpi=120, facecolor="white")
