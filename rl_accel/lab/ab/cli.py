"""The command ``rl-accel ab``: trains the arms (variants) of a recipe and compares them."""

import contextlib
import importlib
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from rl_accel.console import refuse_idle_options, wide_console
from rl_accel.errors import RecipeError, RlAccelError
from rl_accel.files import write_atomically
from rl_accel.lab.ab import report
from rl_accel.lab.ab.progress import ProgressView
from rl_accel.lab.ab.recipe import Recipe, RunPlan, load, plan_runs, prepare_command, save
from rl_accel.lab.ab.runner import RunResult, Stop, last_lines, load_result, only_writer, prepare, run_all
from rl_accel.runtime import is_installed

_MANIFEST = "ab.json"
_PREPARE = "prepare"
"""Value of ``--only`` that selects the recipe's prepare command instead of a run."""


def _names(_context: Any, _parameter: Any, value: str | None) -> list[str] | None:
    return None if value is None else [part.strip() for part in value.split(",") if part.strip()]


def _numbers(_context: Any, _parameter: Any, value: str | None) -> list[int] | None:
    names = _names(None, None, value)
    try:
        return None if names is None else list(map(int, names))
    except ValueError as error:
        raise click.BadParameter(f"wants whole numbers separated by commas, found {value!r}") from error


@click.command()
@click.argument("recipe", required=False, type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for logs and the report (default: out/NAME).",
)
@click.option("--platform", help="One of the recipe's platforms, such as cpu (default: the first).")
@click.option("--arms", callback=_names, help="Comma-separated arms to run (default: all of the recipe).")
@click.option("--seeds", callback=_numbers, help="Comma-separated seeds (default: those of the recipe).")
@click.option("--steps", type=click.IntRange(min=1), help="Training steps of each run (default: that of the recipe).")
@click.option("--resume", is_flag=True, help="Keep runs that an earlier call completed with the same command.")
@click.option("--overwrite", is_flag=True, help="Discard the runs that DIR already holds.")
@click.option("--dry-run", is_flag=True, help="Print the command of each run and stop.")
@click.option(
    "--only",
    metavar="NAME",
    help="Make only this run (such as stock-seed0) or only 'prepare', without a report. For a run that is a job of its own.",
)
@click.option("--ray-address", help="Ray cluster that runs join (default: each starts one of its own).")
@click.option(
    "--report-only",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Rebuild the report of DIR from its kept metrics; run nothing. A RECIPE given as well replaces the kept one.",
)
def ab(recipe: Path | None, platform: str | None, report_only: Path | None, **options: Any) -> None:
    """Run the arms of RECIPE (a file, or a folder with a recipe.yaml) as real trainer processes, one after the other,
    and compare them.

    Ends with a table and a report.html in the folder of --out. Exit code 0: all runs completed and no check is red; 1: a
    run failed or a check is red; 2: the recipe or an option is wrong; 128 + signal: stopped by a signal, metrics so far
    are kept and reported.
    """
    console = wide_console(report.WIDTH, markup=False, highlight=False)
    if recipe is not None and recipe.is_dir():
        recipe /= "recipe.yaml"
    try:
        if report_only is not None:
            refuse_idle_options("with --report-only", *options)
            sys.exit(_rebuild(report_only.resolve(), recipe, platform, console))
        if recipe is None:
            raise click.UsageError("give RECIPE, or --report-only DIR")
        sys.exit(_run_or_print(recipe, platform, console, **options))
    except RecipeError:  # sets exit code 2, as all user errors do
        raise
    except (RlAccelError, OSError) as error:
        raise click.ClickException(str(error)) from error


def _run_or_print(
    recipe: Path,
    platform: str | None,
    console: Console,
    *,
    out: Path | None,
    arms: list[str] | None,
    seeds: list[int] | None,
    steps: int | None,
    dry_run: bool,
    ray_address: str | None,
    **how_to_run: Any,
) -> int:
    """Runs a recipe, or only prints its commands (``dry_run``). Returns the exit code.

    ``how_to_run``: the options ``--only``, ``--resume`` and ``--overwrite``.
    """
    if dry_run:
        refuse_idle_options("with --dry-run", *how_to_run)
    spec = load(recipe, platform)
    if out is None:
        out = Path("out") / spec.name
        console.print(f"Logs and report go to {out}; --out names another folder")
    recipe = recipe.resolve()
    out = out.resolve()
    plans = plan_runs(spec, recipe.parent, out, arms=arms, seeds=seeds, steps=steps)
    plans = _without_missing_modules(plans, spec)
    if ray_address is not None:
        plans = [replace(plan, env={**plan.env, "RAY_ADDRESS": ray_address}) for plan in plans]
    if not dry_run:
        return _run_plans(spec, recipe, out, plans, console, **how_to_run)
    for plan in plans:
        env = " ".join(f"{key}={shlex.quote(value)}" for key, value in plan.env.items() if value is not None)
        click.echo(f"# {plan.name}\n{env} {shlex.join(plan.command)}".replace("\n ", "\n"))
    return 0


def _without_missing_modules(plans: list[RunPlan], spec: Recipe) -> list[RunPlan]:
    """Leaves out the arms whose required module (``Arm.needs``) is missing, and prints a line for each."""
    for name, arm in spec.arms.items():
        if arm.needs and not is_installed(arm.needs):
            plans = [plan for plan in plans if plan.arm != name]
            click.echo(f"arm {name} is left out: there is no module {arm.needs}", err=True)
    return plans


def _run_plans(
    spec: Recipe,
    file: Path,
    out: Path,
    plans: list[RunPlan],
    console: Console,
    *,
    only: str | None,
    resume: bool,
    overwrite: bool,
) -> int:
    if resume and overwrite:
        raise click.UsageError("--resume and --overwrite exclude each other")
    for module in ("scipy", "matplotlib", "jinja2"):
        importlib.import_module(module)  # a missing module must fail before hours of training, not after
    chosen = plans if only is None else [plan for plan in plans if plan.name == only]
    if not chosen and only != _PREPARE:
        known = ", ".join([_PREPARE, *(plan.name for plan in plans)])
        raise click.UsageError(f"--only wants one of {known}, found {only!r}")
    existing_runs = [plan.name for plan in chosen if (plan.directory / "run.json").exists()]
    if existing_runs and not resume and not overwrite:
        raise click.UsageError(
            f"{out} already holds {', '.join(existing_runs)}: give --resume, --overwrite or another --out"
        )
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as locks, Stop().listening() as stop:
        for plan in chosen:
            locks.enter_context(only_writer(plan))
        command, env = prepare_command(spec, file.parent, out)
        prepares = only in (None, _PREPARE)
        if command and prepares:
            if not console.is_terminal:
                console.print(f"preparing: {shlex.join(command)}", soft_wrap=True)
            with console.status("preparing data and model"):
                prepare(command, env, file.parent, out / "prepare.log", stop)
        if prepares or not (out / _MANIFEST).exists():
            save(spec, out / "recipe.yaml")
            manifest = {"recipe": str(file), "runs": [plan.name for plan in plans]}
            write_atomically(out / _MANIFEST, json.dumps(manifest, indent=1))
        if stop:
            return 128 + stop.signals[0]
        view = ProgressView(console, chosen, spec.metrics.reward)
        with view.line:
            results = run_all(chosen, view, stop, resume)
        for result in results:
            if result.status in ("failed", "timeout"):
                log = out / result.name / "train.log"
                console.rule(f"{result.name} {result.status}: {result.message}; end of {log}", style="red")
                console.print(last_lines(log), soft_wrap=True)
                console.rule(style="red")
        code = int(any(result.status != "done" for result in results))
        if only is None:
            code = _report(spec, file, out, results, asked=len(plans), console=console)
    return 128 + stop.signals[0] if stop else code


def _rebuild(out: Path, recipe: Path | None, platform: str | None, console: Console) -> int:
    try:
        manifest: dict[str, Any] = json.loads((out / _MANIFEST).read_text())
        names = [str(name) for name in manifest["runs"]]
    except (OSError, ValueError, KeyError) as error:
        raise RecipeError(f"{out} holds no A/B: cannot read {_MANIFEST} ({error})") from error
    spec = load(recipe, platform) if recipe else load(out / "recipe.yaml")
    results = [result for name in names if (result := load_result(out / name)) is not None]
    for result in results:
        if result.status == "running":  # the runner was killed before it could store the final status
            result.status = "interrupted"
            result.message = f"the runner ended at step {result.steps_done}"
    file = recipe or Path(manifest["recipe"])
    return _report(spec, file, out, results, asked=len(names), console=console)


def _report(spec: Recipe, file: Path, out: Path, results: list[RunResult], asked: int, console: Console) -> int:
    summary = report.build(spec, file, out, results, asked)
    report.show(summary, console)
    console.print(f"Report: {out / 'report.html'}", soft_wrap=True)
    return 0 if summary["ok"] else 1
