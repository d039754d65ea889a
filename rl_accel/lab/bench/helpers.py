"""Helpers of the benchmarks: options of the commands, time and memory of functions in one process, and result files."""

import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import psutil
import torch
from rich.console import Console

from rl_accel.console import finite

LEAST, MOST = 3, 7
"""Minimum and maximum number of timed calls of a function. A median of three ignores one disturbed call."""
ONCE_S = 2.0
"""Limit in seconds. A function whose first call exceeds both this limit and the budget is not called again. A function that exceeds
only the budget is, because a single call may be disturbed."""
WARM_S = 1.0
"""Limit in seconds. If a function takes less on average, an untimed call before each timed call warms up caches and memory. In a
slower function, the warm-up is a small part of a call."""

number_option = partial(click.option, show_default=True, callback=finite)
"""Decorator that adds an option with a number to a command. The help text shows the default. NaN and infinity are refused."""


def out_option(files: str, **settings: Any) -> Callable[[Any], Any]:
    """Decorator that adds ``--out``, a folder for results, to a command. The folder is created before anything is measured.

    ``files``: names of the results for the help text. ``settings``: further arguments of :func:`click.option`.
    """

    def created(_context: Any, _parameter: Any, folder: Path | None) -> Path | None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    kind = click.Path(file_okay=False, path_type=Path)
    return click.option("--out", type=kind, callback=created, help=f"Folder for {files}.", **settings)


@dataclass(frozen=True)
class Timing:
    """Measurements of one function: median seconds of a call, and peak extra memory of the first call in bytes."""

    median: float
    peak_extra_bytes: int | None


def interleaved(functions: Mapping[str, Callable[[], Any]], budget_s: float) -> dict[str, Timing]:
    """Times ``functions`` in turn, round after round, so that a change of the machine's speed affects all functions.

    The first call of each function measures memory. If this call takes more than ``budget_s`` seconds and more than ONCE_S seconds,
    its time is the result. Every other function is timed LEAST to MOST times, until its calls have taken ``budget_s`` seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    spent: dict[str, float] = {}
    peaks: dict[str, int | None] = {}
    for name, function in functions.items():
        first: list[float] = []
        peaks[name] = peak_extra_bytes(partial(_once, function, first))
        spent[name] = first[0]
        if first[0] > max(budget_s, ONCE_S):
            seconds[name] = first
    repeated = [name for name, taken in seconds.items() if not taken]
    for turn in range(MOST):
        for name in repeated:
            if turn < LEAST or spent[name] <= budget_s:
                # an untimed call: the system, or a virtual machine's host, may have reclaimed memory during a slow function
                if spent[name] <= WARM_S * (turn + 1):
                    _once(functions[name], [])
                _once(functions[name], seconds[name])
                spent[name] += seconds[name][-1]
    return {name: Timing(statistics.median(taken), peaks[name]) for name, taken in seconds.items()}


def peak_extra_bytes(function: Callable[[], Any]) -> int | None:
    """Calls ``function`` and returns the peak increase of memory in use, in bytes, including the result of the call.

    Counts torch's allocations on a CUDA device, else the resident memory of this process; None if Linux does not allow the
    measurement. Memory that another thread frees during the call makes the number too low.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        function()
        return None
    before = psutil.Process().memory_info().rss
    function()
    status = Path("/proc/self/status").read_text()
    return max(int(status.partition("VmHWM:")[2].split()[0]) * 1024 - before, 0)


def available_bytes() -> int:
    """Returns the number of bytes of memory that can be allocated without swapping."""
    return int(psutil.virtual_memory().available)


def met(holds: bool) -> str:
    return "met" if holds else "NOT met"


def results_file(out: Path | None, name: str, results: Any, console: Console) -> None:
    """Writes ``results`` as JSON to the file ``name`` in the folder ``out``, and prints the path. Without ``out``, does nothing."""
    if out is not None:
        (out / name).write_text(json.dumps(results, indent=1))
        console.print(str(out / name), soft_wrap=True, markup=False)


def _once(function: Callable[[], Any], seconds: list[float]) -> None:
    started = time.perf_counter()
    result = function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds.append(time.perf_counter() - started)
    del result
