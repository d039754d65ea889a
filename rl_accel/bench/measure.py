"""Timing and memory of functions run side by side in one process."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of one contestant: the median, the extremes and how often it ran."""

    median: float
    fastest: float
    slowest: float
    runs: int


def interleaved(functions: Mapping[str, Callable[[], Any]], budget_s: float, most: int = 9) -> dict[str, Timing]:
    """Time ``functions`` in turn, round after round, so that a change of the machine's speed meets all of them.

    Each is called once beforehand, uncounted. One that has used ``budget_s`` seconds sits out later rounds; every one is
    counted at least twice, unless a single call takes longer than ``budget_s``.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    spent = dict.fromkeys(functions, 0.0)
    for name, function in functions.items():
        spent[name] += _once(function)
        if spent[name] > budget_s:
            seconds[name].append(spent[name])
    for _ in range(most):
        for name, function in functions.items():
            if spent[name] <= budget_s:
                taken = _once(function)
                spent[name] += taken
                seconds[name].append(taken)
    return {
        name: Timing(statistics.median(found), min(found), max(found), len(found)) for name, found in seconds.items()
    }


def peak_extra_bytes(function: Callable[[], Any]) -> int | None:
    """Call ``function`` and return by how much it raised this process's memory at its highest, its result included.

    On Linux, from the kernel's own high-water mark; None where that cannot be reset.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    before = _status("VmRSS")
    result = function()
    peak = _status("VmHWM")
    del result
    return max(peak - before, 0)


def available_bytes() -> int:
    """Memory that can be taken without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def _once(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    result = function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    taken = time.perf_counter() - started
    del result
    return taken
