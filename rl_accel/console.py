"""Output of the command ``rl-accel`` (consoles, text tables), and an error for options that have no effect.

The libraries rich and click are imported when they are needed, because the runtime imports this module in every process.
"""

import math
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")


def wide_console(width: int = 160, **options: Any) -> "Console":
    """Returns a console for tables, as wide as the terminal. Without a terminal, the width is ``width`` characters, or the
    environment variable COLUMNS if that is larger. ``options`` are further arguments of :class:`rich.console.Console`.
    """
    from rich.console import Console

    columns = os.environ.get("COLUMNS", "")
    wanted = max(width, int(columns) if columns.isdecimal() else 0)
    return Console(width=None if sys.stdout.isatty() else wanted, **options)


def say(console: "Console", *lines: str) -> None:
    """Prints ``lines`` as they are, without wrapping, markup or colours."""
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def show_table(console: "Console", columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> None:
    """Prints a table. The first column is left-aligned, the others are right-aligned."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=title or None, box=SIMPLE)
    for index, heading in enumerate(columns):
        table.add_column(heading, justify="right" if index else "left")
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)


def progress(items: Sequence[T], what: str) -> Iterable[T]:
    """Yields ``items``, and meanwhile shows a progress bar named ``what`` if standard error is a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(file=sys.__stderr__)  # sys.stderr may be redirected
    return track(items, what, console=console, transient=True, disable=not console.is_terminal)


def aligned(rows: Iterable[Sequence[str]], indent: int = 0) -> list[str]:
    """Formats table rows as text lines with aligned columns. ``indent``: number of spaces before each line."""
    table = [tuple(row) for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table)
    return [" " * indent + line.rstrip() for line in lines]


def refuse_idle_options(mode: str, *options: str) -> None:
    """Raises click.UsageError if the user gave one of ``options``, which have no effect in this call of the command.

    ``mode`` says for the error message how the command was called, such as "with --check".
    """
    import click

    context = click.get_current_context()
    for parameter in context.command.params:
        is_given = context.get_parameter_source(str(parameter.name)) is click.core.ParameterSource.COMMANDLINE
        if is_given and parameter.name in options:
            name = parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name
            raise click.UsageError(f"{name} has no effect {mode}")


def finite(_context: Any, _parameter: Any, value: float | None) -> float | None:
    """Callback of a click option that takes a number: raises click.UsageError for NaN and infinities, which click accepts."""
    import click

    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"wants a finite number, found {value}")
    return value
