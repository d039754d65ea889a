"""Command ``rl-accel bench advantages``: times verl's REINFORCE++ and ``masked_whiten``, and rl-accel's fast replacements.

A function is timed only if its replacement returns the same bits as verl's function.
"""

import gc
import importlib
import pkgutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

import click
import torch
from rich.progress import track

from rl_accel.console import show_table, wide_console
from rl_accel.features import ADVANTAGES
from rl_accel.lab.bench.helpers import available_bytes, number_option

REPEATS = 3
"""Number of timed calls of each function. A median of three ignores one disturbed call."""
SLOW_SECONDS = 5.0
"""Limit in seconds. After a call that takes longer, a function is not called again, so that large shapes do not take minutes."""
BYTES_PER_TOKEN = 72
"""Upper bound of the benchmark's peak memory, in bytes per token of the batch: arguments, the results of verl's function and of the
replacement, and temporary tensors."""


def patches() -> list[Any]:
    """Returns verl's patches of the feature ``advantages``, in the order in which the feature applies them."""
    modules = ADVANTAGES.switches["verl"]
    return [patch for module in modules for patch in importlib.import_module(module).SWITCHES]


def batch(rows: int, tokens: int) -> dict[str, Any]:
    """Returns a random batch: arguments for every function of verl that is timed, by parameter name.

    Tensors have the shape [``rows``, ``tokens``]. The mask of each row ends at a random length.
    """
    from omegaconf import OmegaConf

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, tokens + 1, (rows, 1), generator=generator)
    mask = (torch.arange(tokens) < lengths).long()
    rewards = torch.zeros(rows, tokens)
    rewards.scatter_(1, lengths - 1, torch.randint(0, 2, (rows, 1), generator=generator).float())
    config = OmegaConf.create({"gamma": 0.99})
    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "values": rewards,
        "mask": mask,
        "config": config,
    }


def time_functions(rows: int, tokens: int) -> list[dict[str, Any]]:
    """Times every function of verl that rl-accel replaces, on a batch [``rows``, ``tokens``]: first without, then with all patches.

    Returns a dict per function with the median seconds of verl's function (``stock_s``) and of the replacement (``fast_s``). Both
    are None if the results differ in a bit.
    """
    data = batch(rows, tokens)
    everything = patches()
    records = []
    for patch in track(everything, description=f"{rows} x {tokens}", transient=True):
        arguments = {name: data[name] for name in patch.params if name in data}
        expected, stock_s = _timed(pkgutil.resolve_name(patch.target), arguments)
        with ExitStack() as applied:
            for other in everything:
                other.apply(None)
                applied.callback(other.revert)
            result, fast_s = _timed(pkgutil.resolve_name(patch.target), arguments)
        same = all(map(_same_bits, _tensors(expected), _tensors(result)))
        records.append(
            {
                "estimator": patch.name.removeprefix("verl."),
                "same_bits": same,
                "stock_s": stock_s if same else None,
                "fast_s": fast_s if same else None,
            }
        )
        del expected, result
        gc.collect()
    return records


def _timed(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[Any, float]:
    result = function(**arguments)  # an untimed call, which fills caches and compiles kernels
    seconds: list[float] = []
    while len(seconds) < REPEATS:
        start = time.perf_counter()
        function(**arguments)
        seconds.append(time.perf_counter() - start)
        if seconds[-1] > SLOW_SECONDS:
            break
    return result, median(seconds)


def _tensors(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype == torch.float32 and torch.equal(a.view(torch.int32), b.view(torch.int32))


@click.command("advantages")
@number_option("--rows", "-B", type=click.IntRange(2), default=1024, help="Responses per batch.")
@number_option("--tokens", "-T", type=click.IntRange(1), default=8192, help="Tokens of the longest response.")
def bench_advantages(rows: int, tokens: int) -> None:
    """Time verl's REINFORCE++ and masked_whiten against rl-accel's fast replacements."""
    try:
        importlib.import_module("verl.trainer.ppo.core_algos")
    except ImportError as error:
        raise click.ClickException(
            f"this benchmark measures verl's own functions, and verl is not usable: {error}"
        ) from error
    needed, free = rows * tokens * BYTES_PER_TOKEN, available_bytes()
    if needed > free:
        raise click.ClickException(
            f"{rows} x {tokens} wants {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free"
        )
    records = time_functions(rows, tokens)
    cells = []
    for record in records:
        numbers = ("bits", "DIFFER", "")
        if record["same_bits"]:
            stock, fast = record["stock_s"], record["fast_s"]
            numbers = (f"{stock * 1e3:.1f}", f"{fast * 1e3:.1f}", f"{stock / fast:.1f}x")
        cells.append((record["estimator"], *numbers))
    title = f"verl's functions at {rows} x {tokens} (median)"
    show_table(wide_console(), ("estimator", "stock ms", "ours ms", "ratio"), cells, title)
    if not all(record["same_bits"] for record in records):
        raise click.ClickException("a replacement gives other bits than verl's own function; its numbers were left out")
