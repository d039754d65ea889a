"""The command ``rl-accel``. The module of a subcommand is imported when the subcommand is called, so that ``--help`` is fast."""

import contextlib
import errno
import gc
import importlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from rl_accel import __version__
from rl_accel.console import aligned, refuse_idle_options
from rl_accel.errors import RlAccelError

_LAZY = {
    "slime-config": ("integrations.slime.custom_config", "Write or check the YAML for slime's --custom-config-path."),
    "profile": ("plan.profile_report", "Where a step's time went in a run, and which flag would save most."),
    "plan": ("plan.command", "What the features would do to a step of your run, before you spend a GPU hour."),
    "stacks": ("integrations.ray.stall", "What a running job waits for, with the stacks of its processes."),
    "run": ("relaunch", "Run a trainer, and again with other overrides when it asks for that."),
    "compare": ("lab.ab.compare", "The report of an A/B over runs that were launched elsewhere."),
    "ab": ("lab.ab.cli", "Train the arms of a recipe one after the other and report the difference."),
}
_EXTRAS = {
    "report": ("matplotlib", "jinja2", "scipy"),
    "verl": ("verl",),
}
"""Mapping from group of optional dependencies (``pip install '.[report]'``) to packages of the group."""


class _LazyGroup(click.Group):
    """A click group that imports the module of a command on first use.

    ``lazy`` maps each command to its module below ``rl_accel`` and its help text. The command ``x-y`` is the function ``x_y``.
    """

    def __init__(self, *args: Any, lazy: dict[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self._lazy})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self._lazy:
            return super().get_command(ctx, name)
        module = importlib.import_module(f"rl_accel.{self._lazy[name][0]}")
        command: click.Command = getattr(module, name.replace("-", "_"))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [
            (name, self._lazy[name][1] if name in self._lazy else self.commands[name].get_short_help_str(100))
            for name in self.list_commands(ctx)
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


_FIRST = """\
Have a log of a run that was too slow?
  rl-accel profile LOG                  where a step's time went, and which flag would save most
  rl-accel plan LOG                     what the features would do to a step
  rl-accel compare LOG --against LOG    whether another run was faster, and learned the same
No log yet?
  rl-accel doctor                       what works with the frameworks here
A run stands still?
  rl-accel stacks                       what its processes wait for
rl-accel --help lists all commands.
"""


@click.group(cls=_LazyGroup, lazy=_LAZY, invoke_without_command=True)
@click.version_option(__version__, prog_name="rl-accel")
@click.pass_context
def cli(context: click.Context) -> None:
    """Faster synchronous RL post-training on verl and slime, without a fork."""
    if context.invoked_subcommand is None:
        click.echo(_FIRST, nl=False)


@cli.group()
def bench() -> None:
    """Benchmarks of single features. A benchmark that finds wrong results prints no numbers for them."""


@bench.command("gae")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for gae.png.")
@click.option("--batch", type=click.IntRange(min=1), help="Only this batch size, and a verdict in one sentence.")
@click.option("--tokens", type=click.IntRange(min=1), help="Only this response length; goes with --batch.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
def bench_gae(**options: Any) -> None:
    """Time GAE kernels against the recurrence of verl's loop. Whitening is left out, because it is the same for all kernels.

    A kernel with wrong results gets no number, and the exit status is 1. Missed goals are shown but do not change the exit status,
    because machines are shared and noisy.
    """
    are_correct = importlib.import_module("rl_accel.lab.bench_gae").run(**options)
    raise SystemExit(0 if are_correct else 1)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def status(as_json: bool) -> None:
    """Shows the features that the flags in this shell's environment variables turn on. Imports no framework."""
    from rl_accel.runtime import RUNTIME

    RUNTIME.adopt(os.environ.get("RL_ACCEL_SOURCES"))
    answer = RUNTIME.status()
    click.echo(json.dumps(answer.to_dict(), indent=2) if as_json else str(answer))
    for warning in RUNTIME.flags().warnings:
        click.echo(warning, err=True)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--recipe", type=click.Path(path_type=Path), help="Check whether this machine has what the recipe needs.")
@click.option("--platform", help="With --recipe: one of its platforms (default: the first).")
def doctor(as_json: bool, recipe: Path | None, platform: str | None) -> None:
    """Reports installed frameworks, versions and kernel backends, and tries to apply every feature to the installed frameworks.

    With --recipe, checks instead the packages, configuration, model and data that the recipe needs. The exit code is 1
    if something is missing, or if a feature cannot work with the installed framework.
    """
    gc.disable()  # a quarter of the processor time of importing the frameworks; this process ends soon
    from rl_accel.doctor import as_text, diagnose

    if recipe is not None:
        preflight = importlib.import_module("rl_accel.lab.ab.preflight")
        rows = preflight.check_recipe(recipe / "recipe.yaml" if recipe.is_dir() else recipe, platform)
        click.echo(json.dumps(rows, indent=2) if as_json else preflight.as_text(rows))
        raise SystemExit(any(verdict in ("missing", "wrong") for _, verdict, _ in rows))

    refuse_idle_options("without --recipe", "platform")
    diagnosis = diagnose()
    click.echo(json.dumps(diagnosis, indent=2) if as_json else as_text(diagnosis))
    raise SystemExit(any(check["verdict"] == "cannot" for check in diagnosis["checks"]))


@cli.command()
def flags() -> None:
    """Lists every flag with its default value, as written in RL_ACCEL_CONFIG, on verl's command line or in rl_accel.enable()."""
    from rl_accel.config import describe_flags

    for line in aligned(describe_flags()):
        click.echo(line)


def main() -> None:
    """Runs the command ``rl-accel``. Prints an RlAccelError, missing package or file error as one line, and exits with code 2."""
    sys.stdout = sys.stdout or io.StringIO()  # None if the caller has closed standard output
    with contextlib.suppress(AttributeError, OSError):  # another kind of stream, or its file was replaced
        # a terminal's encoding may lack characters of a path or a table
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        cli(prog_name="rl-accel")
    except RlAccelError as error:
        click.echo(f"rl-accel: {error}", err=True)
        raise SystemExit(2) from error
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = next((extra for extra, packages in _EXTRAS.items() if package in packages), None)
        if extra is None:
            raise
        click.echo(f"rl-accel: this needs {package}: in a checkout of rl-accel, pip install '.[{extra}]'", err=True)
        raise SystemExit(2) from error
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:  # an error of a network or a process, not of a file
            raise
        click.echo(f"rl-accel: {f'{error.filename}: ' if error.filename else ''}{error.strerror}", err=True)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
