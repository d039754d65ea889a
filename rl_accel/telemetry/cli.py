"""The command ``rl-accel profile``."""

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from rl_accel.telemetry import profile as profiles
from rl_accel.telemetry import stage_clock
from rl_accel.telemetry.profile import WARMUP, Profile, Saving, format_seconds

_WIDTH = 140
_PARTS = {
    "most": "  until nine in ten responses are generated",
    "waiting": "  waiting for the longest responses",
    "reward": "  rewards after the last generation",
    "rest": "  noticing and storing",
}


@click.command()
@click.argument("run_dir", type=click.Path(exists=True, path_type=Path))
@click.option("--warmup", type=click.IntRange(0), default=WARMUP, show_default=True, help="First steps to leave out.")
@click.option(
    "--picture", type=click.Path(path_type=Path), help="Where to write the PNG.  [default: RUN_DIR/profile.png]"
)
@click.option("--no-picture", is_flag=True, help="Print only.")
def profile(run_dir: Path, warmup: int, picture: Path | None, no_picture: bool) -> None:
    """Where the time of a step went in the run in RUN_DIR, and which flag would save most.

    RUN_DIR holds the file of verl's file logger: a run of `rl-accel ab`, or any folder with it. If the run had
    +rl_accel.telemetry.enable=True, this also says what generation was spent on; if not, only stages.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    run = profiles.profile(run_dir, warmup)
    _show(run, console)
    if not no_picture:
        from rl_accel.telemetry.timeline import draw

        path = picture or (run_dir if run_dir.is_dir() else run_dir.parent) / "profile.png"
        draw(run, path)
        console.print(f"Picture: {path}", markup=False, highlight=False, soft_wrap=True)


def _show(run: Profile, console: Console) -> None:
    span = f"steps {run.steps[0]}-{run.steps[-1]}" if len(run.steps) > 1 else f"step {run.steps[0]}"
    console.print(f"{run.log}: means of {span}", markup=False, highlight=False, soft_wrap=True)
    table = Table("stage", "seconds", "share of the step")
    for column in table.columns[1:]:
        column.justify = "right"
    shares = stage_clock.shares(run.stages)
    for stage, seconds in run.stages.items():
        table.add_row(stage, format_seconds(seconds), f"{shares[stage]:.1%}")
        if stage == "gen" and run.generations:
            for name, label in _PARTS.items():
                part = run.mean(name)
                if part is not None:
                    table.add_row(label, format_seconds(part), f"{part / run.step_seconds:.1%}", style="dim")
    table.add_row("step", format_seconds(run.step_seconds), f"{sum(shares.values()):.1%}", style="bold")
    console.print(table)
    _show_generation(run, console)
    for line in run.missing:
        console.print(f"not known: {line}", markup=False, highlight=False, soft_wrap=True)
    if run.savings:
        _show_savings(run.savings, run.step_seconds, console)


def _show_generation(run: Profile, console: Console) -> None:
    if not run.generations:
        return
    preemptions = "unknown" if run.preemptions is None else f"{run.preemptions:.1f}"
    lines = {
        "idle share of generation": _percent(run.mean("idle")),
        "most responses at once": _number(run.mean("concurrency")),
        "responses a step": f"{_number(run.mean('responses'))}, {_number(run.mean('cancelled'))} of them cancelled",
        "tokens a step": _number(run.mean("tokens")),
        "preemptions a step": preemptions,
    }
    done = [item.completion for item in run.generations if item.completion is not None]
    if done:
        p50, p90, p99, longest = (
            sum(getattr(item, name) for item in done) / len(done) for name in ("p50", "p90", "p99", "longest")
        )
        lines["a response, until its reward"] = (
            f"p50 {format_seconds(p50)}, p90 {format_seconds(p90)}, p99 {format_seconds(p99)}, longest {format_seconds(longest)}"
        )
    for label, text in lines.items():
        console.print(f"{label + ':':<32}{text}", markup=False, highlight=False)
    if len(run.servers) > 1 and run.last is not None:
        table = Table("server", "responses", "tokens", "idle", "longest", title=f"Servers in step {run.last.step}")
        for name, part in run.servers.items():
            longest_here = "" if part.completion is None else format_seconds(part.completion.longest)
            table.add_row(name, str(part.responses), str(part.tokens), _percent(part.idle), longest_here)
        console.print(table)


def _show_savings(rows: Sequence[Saving], step_seconds: float, console: Console) -> None:
    table = Table(
        "what takes time", "seconds", "share", "what would reduce it", "gain", title="Where it could be saved"
    )
    for saving in rows:
        gain = "unknown" if saving.gain is None else f"{format_seconds(saving.gain)} ({saving.gain / step_seconds:.0%})"
        table.add_row(
            saving.name, format_seconds(saving.seconds), f"{saving.seconds / step_seconds:.1%}", saving.advice, gain
        )
    console.print(table)
    for saving in rows:
        console.print(f"{saving.name}: {saving.arithmetic}", markup=False, highlight=False, soft_wrap=True)
    best = max(rows, key=lambda saving: (saving.gain or 0.0, saving.seconds))
    if best.gain:
        line = f"Largest saving: {best.name}, {format_seconds(best.seconds)} a step. {best.advice} would save about "
        line += f"{format_seconds(best.gain)} of {format_seconds(step_seconds)} ({best.gain / step_seconds:.0%})."
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f}"
