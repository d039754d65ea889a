"""The command ``rl-accel profile``."""

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from rl_accel.lab.ab.report import seconds as text_of
from rl_accel.telemetry import stage_clock
from rl_accel.telemetry.profile import WARMUP, Profile, Waste
from rl_accel.telemetry.profile import profile as profile_of

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
    found = profile_of(run_dir, warmup)
    _show(found, console)
    if not no_picture:
        from rl_accel.telemetry.timeline import draw

        path = picture or (run_dir if run_dir.is_dir() else run_dir.parent) / "profile.png"
        draw(found, path)
        console.print(f"Picture: {path}", markup=False, highlight=False, soft_wrap=True)


def _show(found: Profile, console: Console) -> None:
    span = f"steps {found.steps[0]}-{found.steps[-1]}" if len(found.steps) > 1 else f"step {found.steps[0]}"
    console.print(f"{found.log}: means of {span}", markup=False, highlight=False, soft_wrap=True)
    table = Table("stage", "seconds", "share of the step")
    for column in table.columns[1:]:
        column.justify = "right"
    shares = stage_clock.shares(found.stages)
    for stage, seconds in found.stages.items():
        table.add_row(stage, text_of(seconds), f"{shares[stage]:.1%}")
        if stage == "gen" and found.generations:
            for name, label in _PARTS.items():
                part = found.mean(name)
                if part is not None:
                    table.add_row(label, text_of(part), f"{part / found.step_seconds:.1%}", style="dim")
    table.add_row("step", text_of(found.step_seconds), f"{sum(shares.values()):.1%}", style="bold")
    console.print(table)
    _show_generation(found, console)
    for line in found.missing:
        console.print(f"not known: {line}", markup=False, highlight=False, soft_wrap=True)
    if found.wastes:
        _show_wastes(found.wastes, found.step_seconds, console)


def _show_generation(found: Profile, console: Console) -> None:
    if not found.generations:
        return
    preemptions = "unknown" if found.preemptions is None else f"{found.preemptions:.1f}"
    lines = {
        "idle share of generation": _percent(found.mean("idle")),
        "most responses at once": _number(found.mean("concurrency")),
        "responses a step": f"{_number(found.mean('responses'))}, {_number(found.mean('cancelled'))} of them cancelled",
        "tokens a step": _number(found.mean("tokens")),
        "preemptions a step": preemptions,
    }
    done = [item.completion for item in found.generations if item.completion is not None]
    if done:
        p50, p90, p99, longest = (
            sum(getattr(item, name) for item in done) / len(done) for name in ("p50", "p90", "p99", "longest")
        )
        lines["a response, until its reward"] = (
            f"p50 {text_of(p50)}, p90 {text_of(p90)}, p99 {text_of(p99)}, longest {text_of(longest)}"
        )
    for label, text in lines.items():
        console.print(f"{label + ':':<32}{text}", markup=False, highlight=False)
    if len(found.servers) > 1 and found.last is not None:
        table = Table("server", "responses", "tokens", "idle", "longest", title=f"Servers in step {found.last.step}")
        for name, part in found.servers.items():
            longest_here = "" if part.completion is None else text_of(part.completion.longest)
            table.add_row(name, str(part.responses), str(part.tokens), _percent(part.idle), longest_here)
        console.print(table)


def _show_wastes(rows: Sequence[Waste], step_seconds: float, console: Console) -> None:
    table = Table(
        "what takes time", "seconds", "share", "what would reduce it", "gain", title="Where it could be saved"
    )
    for waste in rows:
        gain = "unknown" if waste.gain is None else f"{text_of(waste.gain)} ({waste.gain / step_seconds:.0%})"
        table.add_row(waste.name, text_of(waste.seconds), f"{waste.seconds / step_seconds:.1%}", waste.advice, gain)
    console.print(table)
    for waste in rows:
        console.print(f"{waste.name}: {waste.arithmetic}", markup=False, highlight=False, soft_wrap=True)
    best = max(rows, key=lambda waste: (waste.gain or 0.0, waste.seconds))
    if best.gain:
        console.print(
            f"Largest saving: {best.name}, {text_of(best.seconds)} a step. {best.advice} would save about {text_of(best.gain)} "
            f"of {text_of(step_seconds)} ({best.gain / step_seconds:.0%}).",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f}"
