"""The command ``rl-accel ab``."""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from rl_accel.errors import RecipeError, RlAccelError
from rl_accel.lab.ab import report
from rl_accel.lab.ab.extra import needs
from rl_accel.lab.ab.plan import RunPlan, plan_runs, prepare_command
from rl_accel.lab.ab.progress import ProgressView
from rl_accel.lab.ab.recipe import Recipe, load, save
from rl_accel.lab.ab.runner import RunResult, Stop, last_lines, load_result, prepare, run_all

_MANIFEST = "ab.json"
_WIDTH = 180
"""Columns of tables in a file or a pipe."""


class _Failure(click.ClickException):
    """An error in words instead of a traceback; exit code 1."""


class _WrongRecipe(_Failure):
    exit_code = 2


def _names(_: click.Context, __: click.Parameter, value: str | None) -> list[str] | None:
    return None if value is None else [part.strip() for part in value.split(",") if part.strip()]


def _numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> list[int] | None:
    parts = _names(context, parameter, value)
    try:
        return None if parts is None else [int(part) for part in parts]
    except ValueError as error:
        raise click.BadParameter(f"wants whole numbers separated by commas, found {value!r}") from error


@click.command()
@click.argument("recipe", required=False, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for logs and the report.")
@click.option("--arms", callback=_names, help="Comma-separated arms to run (default: all of the recipe).")
@click.option("--seeds", callback=_numbers, help="Comma-separated seeds (default: those of the recipe).")
@click.option("--steps", type=click.IntRange(min=1), help="Training steps of each run (default: that of the recipe).")
@click.option("--resume", is_flag=True, help="Keep runs that an earlier call completed with the same command.")
@click.option("--overwrite", is_flag=True, help="Discard the runs that DIR already holds.")
@click.option("--dry-run", is_flag=True, help="Print the command of each run and stop.")
@click.option(
    "--report-only",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Rebuild the report of DIR from its kept metrics; run nothing. A RECIPE given as well replaces the kept one.",
)
def ab(
    recipe: Path | None,
    out: Path | None,
    arms: list[str] | None,
    seeds: list[int] | None,
    steps: int | None,
    resume: bool,
    overwrite: bool,
    dry_run: bool,
    report_only: Path | None,
) -> None:
    """Run the arms of RECIPE (a file, or a folder with a recipe.yaml) as real trainer processes, one after the other,
    and compare them.

    Ends with a table and DIR/report.html. Exit code 0: all runs completed and no check is red; 1: a run failed or a
    check is red; 2: the recipe or an option is wrong; 128 + signal: stopped, what was measured is kept and reported.
    """
    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH)
    if recipe is not None and recipe.is_dir():
        recipe /= "recipe.yaml"
    try:
        if report_only is not None:
            sys.exit(_rebuild(report_only.resolve(), recipe, console))
        if recipe is None or out is None:
            raise click.UsageError("give RECIPE and --out DIR, or --report-only DIR")
        if resume and overwrite:
            raise click.UsageError("--resume and --overwrite exclude each other")
        spec, out, home = load(recipe), out.resolve(), recipe.resolve().parent
        plans = plan_runs(spec, home, out, arms, seeds, steps)
        if dry_run:
            for plan in plans:
                env = " ".join(f"{key}={shlex.quote(value)}" for key, value in plan.env.items() if value is not None)
                click.echo(f"# {plan.name}\n{env} {shlex.join(plan.command)}".replace("\n ", "\n"))
            return
        sys.exit(_run(spec, recipe.resolve(), out, plans, resume, overwrite, console))
    except RecipeError as error:
        raise _WrongRecipe(str(error)) from error
    except (RlAccelError, OSError) as error:
        raise _Failure(str(error)) from error


def _run(
    spec: Recipe, file: Path, out: Path, plans: list[RunPlan], resume: bool, overwrite: bool, console: Console
) -> int:
    for module in ("psutil", "scipy", "matplotlib", "jinja2"):
        needs(module)  # before hours of training, not after
    held = [plan.name for plan in plans if (plan.directory / "run.json").exists()]
    if held and not resume and not overwrite:
        raise click.UsageError(f"{out} already holds {', '.join(held)}: give --resume, --overwrite or another --out")
    out.mkdir(parents=True, exist_ok=True)
    with Stop().listening() as stop:
        command, env = prepare_command(spec, file.parent, out)
        if command:
            if not console.is_terminal:
                console.print(f"preparing: {shlex.join(command)}", markup=False, highlight=False, soft_wrap=True)
            with console.status("preparing data and model"):
                prepare(command, env, file.parent, out / "prepare.log", stop)
        save(spec, out / "recipe.yaml")
        manifest = {"recipe": str(file), "runs": [plan.name for plan in plans]}
        (out / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        if stop:
            return 128 + stop.signals[0]
        with ProgressView(console, plans, spec.metrics.reward) as view:
            results = run_all(plans, view, stop, resume)
        _show_failures(results, out, console)
        code = _report(spec, file, out, results, len(plans), console)
    return 128 + stop.signals[0] if stop else code


def _rebuild(out: Path, recipe: Path | None, console: Console) -> int:
    try:
        manifest: dict[str, Any] = json.loads((out / _MANIFEST).read_text())
        names = [str(name) for name in manifest["runs"]]
    except (OSError, ValueError, KeyError) as error:
        raise RecipeError(f"{out} holds no A/B: cannot read {_MANIFEST} ({error})") from error
    spec = load(recipe or out / "recipe.yaml")
    results = [result for name in names if (result := load_result(out / name)) is not None]
    for result in results:
        if result.status == "running":  # the runner itself was killed
            result.status, result.message = "interrupted", f"the runner ended at step {result.steps_done}"
    return _report(spec, recipe or Path(manifest["recipe"]), out, results, len(names), console)


def _report(spec: Recipe, file: Path, out: Path, results: list[RunResult], asked: int, console: Console) -> int:
    found = report.build(spec, file, out, results, asked)
    report.show(found, console)
    console.print(f"Report: {out / 'report.html'}", markup=False, highlight=False, soft_wrap=True)
    return 0 if found["ok"] else 1


def _show_failures(results: list[RunResult], out: Path, console: Console) -> None:
    for result in results:
        if result.status in ("failed", "timeout"):
            log = out / result.name / "train.log"
            console.rule(f"{result.name} {result.status}: {result.message}; end of {log}", style="red")
            console.print(last_lines(log), markup=False, highlight=False, soft_wrap=True)
            console.rule(style="red")
