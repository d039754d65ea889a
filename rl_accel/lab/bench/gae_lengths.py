"""``rl-accel bench gae --lengths``: one batch of responses of very different lengths, slime's way against ours.

slime pads every sequence to the longest in a Python loop, scans chunks of 128 tokens one after the other, and cuts the padding off
again. Ours takes the sequences end to end.
"""

import contextlib
import ctypes
import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from rl_accel.lab.bench.contestants import slime_chunk
from rl_accel.lab.bench.measure import interleaved, peak_extra_bytes
from rl_accel.ops.ragged import gae_of_lists

LOGNORMAL = "lognormal"
SLIME, OURS = "slime, padded", "rl-accel"
GOAL = 10.0
GAMMA, LAM = 0.99, 0.95
_SEQUENCES, _LONGEST, _SIGMA = 64, 16384, 1.5
_BUDGET_S = 5.0
_TOLERANCE = 1e-4
_MMAP_THRESHOLD = -3
"""``M_MMAP_THRESHOLD`` of glibc's mallopt."""

Lists = tuple[list[torch.Tensor], list[torch.Tensor]]


def read_lengths(source: str) -> list[int]:
    """Return the lengths in a file: whole numbers of at least 1, separated by anything else. ``lognormal`` draws 64 of them,
    the longest 16,384 tokens.

    Raises:
        ValueError: the file cannot be read or holds something else.
    """
    if source == LOGNORMAL:
        draw = random.Random(0)
        drawn = [draw.lognormvariate(0, _SIGMA) for _ in range(_SEQUENCES)]
        return [max(1, round(_LONGEST * each / max(drawn))) for each in drawn]
    try:
        words = re.split(r"[\s,\[\]]+", Path(source).read_text().strip(" \n\t[],"))
        lengths = [int(word) for word in words]
    except (OSError, ValueError) as error:
        raise ValueError(f"--lengths wants {LOGNORMAL} or a file of whole numbers, found {source}: {error}") from error
    if min(lengths) < 1:
        raise ValueError(f"--lengths wants whole numbers of at least 1, found {min(lengths)} in {source}")
    return lengths


def slime_padded(rewards: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Lists:
    """slime's published algorithm, written anew: copy into [B, longest], chunk scan, views without the padding."""
    longest = max(len(each) for each in values)
    padded_rewards, padded_values = (values[0].new_zeros(len(values), longest) for _ in range(2))
    for row, (reward, value) in enumerate(zip(rewards, values, strict=True)):
        padded_rewards[row, : len(reward)] = reward
        padded_values[row, : len(value)] = value
    advantages, returns = slime_chunk((padded_rewards, padded_values, None, GAMMA, LAM))
    rows = range(len(values))
    return [advantages[i, : len(values[i])] for i in rows], [returns[i, : len(values[i])] for i in rows]


def bench_lengths(source: str, device: str, out: Path | None, console: Console) -> bool:
    """Measure both ways and print time, memory and ratios; whether both are right (else there are no numbers)."""
    lengths = read_lengths(source)
    generator = torch.Generator().manual_seed(0)
    rewards, values = ([torch.randn(n, generator=generator).to(device) for n in lengths] for _ in range(2))
    ways: dict[str, Callable[[], Lists]] = {
        SLIME: lambda: slime_padded(rewards, values),
        OURS: lambda: gae_of_lists(rewards, values, GAMMA, LAM),
    }
    truth = gae_of_lists([r.double() for r in rewards], [v.double() for v in values], GAMMA, LAM, backend="naive")
    errors = {name: _distance(way(), truth) for name, way in ways.items()}
    for name, error in errors.items():
        word = "correct" if error < _TOLERANCE else "[red]WRONG"
        console.print(f"{word}: {name}, {error:.1e} from the loop in float64")
    if max(errors.values()) >= _TOLERANCE:
        return False
    padding = len(lengths) * max(lengths) / sum(lengths)
    console.print(
        f"{len(lengths)} sequences, {sum(lengths):,} tokens, the longest {max(lengths):,}: padded {padding:.1f}x"
    )
    timings = interleaved(ways, _BUDGET_S)
    _give_memory_back()
    peaks = {name: peak_extra_bytes(way) for name, way in ways.items()}
    table = Table()
    for column in ("", "milliseconds", "extra memory, MiB"):
        table.add_column(column, justify="right" if column else "left")
    for name, timing in timings.items():
        memory = "-" if (peak := peaks[name]) is None else f"{peak / 2**20:,.1f}"
        table.add_row(name, f"{timing.median * 1e3:,.2f}", memory)
    console.print(table)
    found: dict[str, Any] = {"device": device, "lengths": lengths, "padding": padding}
    found["time"] = timings[SLIME].median / timings[OURS].median
    console.print(
        f"time: {found['time']:.1f}x less; goal at least {GOAL:g}x: {'met' if found['time'] >= GOAL else 'NOT met'}"
    )
    theirs, ours = peaks[SLIME], peaks[OURS]
    if theirs is not None and ours:
        found["memory"] = theirs / ours
        word = "met" if found["memory"] >= padding else "NOT met"
        console.print(f"memory: {found['memory']:.1f}x less; goal at least the padding, {padding:.1f}x: {word}")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        found["seconds"] = {name: timing.median for name, timing in timings.items()}
        (out / "gae_lengths.json").write_text(json.dumps(found, indent=1))
    return True


def _give_memory_back() -> None:
    """Have the C library return freed memory at once, or tensors of a few hundred kilobytes would seem to cost nothing."""
    with contextlib.suppress(OSError, AttributeError):  # another C library: small tensors are then not counted
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, 1 << 16)
        library.malloc_trim(0)


def _distance(found: Lists, truth: Lists) -> float:
    """The largest relative error in the 2-norm over advantages and returns; NaN counts as infinite."""
    errors = []
    for ours, wanted in zip(found, truth, strict=True):
        a, b = torch.cat(ours).double(), torch.cat(wanted)
        errors.append(float((a - b).norm() / b.norm().clamp(min=1e-30)))
    return max(error if error == error else float("inf") for error in errors)
