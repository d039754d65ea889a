"""Command ``rl-accel bench gae``: checks GAE kernels for correctness and then times the kernels in one process.

A plain copy of the same number of bytes gives a lower bound of the time. With ``--lengths``, the input is one batch of responses
of very different lengths. slime pads every sequence to the longest in a Python loop, scans chunks of 128 tokens one after the
other, and cuts off the padding. rl-accel's kernel needs no padding.
"""

import contextlib
import ctypes
import importlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from rl_accel.console import show_table, wide_console
from rl_accel.lab.bench.helpers import (
    available_bytes,
    interleaved,
    met,
    peak_extra_bytes,
    results_file,
)
from rl_accel.ops import gae, gae_of_lists

LOOP, CHUNK_128, OURS = "verl's loop", "slime chunk 128", "rl-accel"
BATCHES, TOKENS = (1, 8, 64, 256, 1024), (1024, 8192, 32768, 131072)
GOAL_SHAPES = ((256, 32768), (256, 131072))
GOALS = ((LOOP, 60.0), (CHUNK_128, 4.0))
COPY_GOAL = 1.5
COPY = "plain copy"
"""Name of the lower bound of the time: a copy of as many bytes as GAE reads and writes."""
LONGEST_S = 20.0
"""Maximum expected seconds of one call of a GAE implementation. Slower ones are left out, except at shapes with a speed goal."""
GAMMA, LAM = 0.99, 0.95
_TOLERANCE = 1e-4

LOGNORMAL = "lognormal"
SLIME = "slime, padded"
LENGTHS_GOAL = 10.0
_SEQUENCES, _LONGEST, _SIGMA = 64, 16384, 1.5
_LENGTHS_BUDGET_S = 5.0
_MMAP_THRESHOLD = -3
"""Identifier of the setting ``M_MMAP_THRESHOLD`` for glibc's ``mallopt``."""

Shape = tuple[int, int]
Result = tuple[torch.Tensor, torch.Tensor]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, float, float]
Lists = tuple[list[torch.Tensor], list[torch.Tensor]]


@dataclass(frozen=True)
class Contestant:
    """A GAE implementation in the comparison. ``masked``: whether it gets verl's response mask."""

    name: str
    run: Callable[[Inputs], Result]
    masked: bool
    exact: bool = False
    """True if the result must equal the result of verl's loop bit for bit."""


def _ours(backend: str) -> Callable[[Inputs], Result]:
    return lambda inputs: gae(*inputs, backend=backend)


def _deltas(rewards: torch.Tensor, values: torch.Tensor, gamma: float) -> torch.Tensor:
    following = torch.nn.functional.pad(values[:, 1:], (0, 1))
    return rewards + gamma * following - values


def slime_chunk(inputs: Inputs, chunk: int = 128) -> Result:
    """Computes GAE by slime's chunk scan (slime pull request 850), which reverses time, multiplies each chunk by one matrix, and
    passes the running advantage from chunk to chunk."""
    rewards, values, _, gamma, lam = inputs
    rows, tokens = rewards.shape
    decay = gamma * lam
    padded = torch.nn.functional.pad(_deltas(rewards, values, gamma).flip(1), (0, -tokens % chunk))
    blocks = padded.view(rows, -1, chunk)
    steps = torch.arange(chunk, device=rewards.device)
    powers = torch.tensor(decay, device=rewards.device, dtype=rewards.dtype) ** (steps[None, :] - steps[:, None])
    local = blocks @ torch.triu(powers)
    carry = decay ** (steps + 1.0).to(rewards.dtype)
    out = torch.empty_like(local)
    last = rewards.new_zeros(rows)
    for index in range(blocks.shape[1]):
        out[:, index] = local[:, index] + carry * last[:, None]
        last = out[:, index, -1]
    advantages = out.view(rows, -1)[:, :tokens].flip(1)
    return advantages, advantages + values


def contestants(device: str) -> list[Contestant]:
    """Returns the GAE implementations to compare for tensors on ``device``: verl's loop first, rl-accel's fastest kernel second."""
    fastest = "triton" if device == "cuda" else "numba"
    return [
        Contestant(LOOP, _ours("naive"), masked=True, exact=True),
        Contestant(f"{OURS} {fastest}", _ours(fastest), masked=True, exact=fastest == "numba"),
        Contestant(f"{OURS} chunk", _ours("chunk"), masked=True),
        Contestant(CHUNK_128, slime_chunk, masked=False),
    ]


@click.command("gae")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for gae.json and gae.png.")
@click.option("--batch", type=click.IntRange(min=1), help="Only this batch size, and a verdict in one sentence.")
@click.option("--tokens", type=click.IntRange(min=1), help="Only this response length; goes with --batch.")
@click.option(
    "--lengths", metavar="FILE", help="Only a batch of these lengths, against slime's padding; or: lognormal."
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
def bench_gae(out: Path | None, batch: int | None, tokens: int | None, lengths: str | None, device: str) -> None:
    """Time GAE kernels against the recurrence of verl's loop. Whitening is left out, because it is the same for all kernels.

    A kernel with wrong results gets no number, and the exit status is 1. Missed goals are shown but do not change the exit status,
    because machines are shared and noisy.
    """
    if (batch is None) != (tokens is None):
        raise click.UsageError("--batch and --tokens go together")
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device cuda: torch sees no CUDA device here")
    console = wide_console()
    if out is not None:
        importlib.import_module("matplotlib")  # a missing module must fail before minutes of measuring, not after
        out.mkdir(parents=True, exist_ok=True)
    if lengths is not None:
        try:
            right = bench_lengths(lengths, device, out, console)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        raise SystemExit(0 if right else 1)
    sound = _correct_contestants(contestants(device), device, console)
    shapes: list[Shape] = [(b, t) for t in TOKENS for b in BATCHES]
    if batch is not None and tokens is not None:
        shapes = [(batch, tokens)]
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        row = _measure(shape, sound, device, rows, console)
        rows += [] if row is None else [row]
    _show_times(rows, console)
    if batch is not None and rows:
        console.print(verdict(rows[0]))
    _show_goals(rows, console)
    if out is not None:
        results_file(out, "gae.json", {"device": device, "shapes": rows}, console)
        _plot(rows, out / "gae.png")
    if len(sound) < len(contestants(device)):
        raise SystemExit(1)


def make_inputs(shape: Shape, device: str, seed: int = 0) -> Inputs:
    """Returns random rewards and values [B, T], a mask [B, T], gamma and lambda.

    The mask has zeros after the random length of each response, and single zeros before, as between turns.
    """
    random = torch.Generator().manual_seed(seed)
    rows, tokens = shape
    rewards = torch.randn(rows, tokens, generator=random)
    values = torch.randn(rows, tokens, generator=random)
    lengths = torch.randint(tokens // 2, tokens + 1, (rows, 1), generator=random)
    mask = torch.arange(tokens) < lengths
    mask &= torch.arange(tokens) % 64 != 7
    return rewards.to(device), values.to(device), mask.long().to(device), GAMMA, LAM


def _correct_contestants(candidates: list[Contestant], device: str, console: Console) -> list[Contestant]:
    """Returns the GAE implementations that agree with verl's loop in float64.

    Implementations with ``exact`` must also equal verl's loop in float32 bit for bit.
    """
    sound = []
    for contestant in candidates:
        worst, exact = 0.0, True
        for seed, shape in enumerate([(1, 1), (3, 5), (33, 1500), (2, 4099)]):
            inputs = make_inputs(shape, device, seed)
            inputs = inputs if contestant.masked else (*inputs[:2], None, GAMMA, LAM)
            truth = gae(inputs[0].double(), inputs[1].double(), *inputs[2:], backend="naive")
            try:
                result = contestant.run(inputs)
            except Exception as error:  # a contestant that fails must not end the benchmark
                console.print(f"{contestant.name}: {error}", style="red", markup=False)
                worst = float("inf")
                break
            worst = max(worst, *(_distance(a, b) for a, b in zip(result, truth, strict=True)))
            if contestant.exact:
                same = gae(*inputs, backend="naive")
                exact &= all(torch.equal(a, b) for a, b in zip(result, same, strict=True))
        if worst < _TOLERANCE and exact:
            sound.append(contestant)
            kind = "equals the loop bit for bit" if contestant.exact else "agrees with the loop"
            console.print(f"correct: {contestant.name} {kind}; {worst:.1e} from float64")
        else:
            console.print(
                f"[red]WRONG: {contestant.name} is {worst:.1e} from float64, bit-identical: {exact}; no numbers"
            )
    return sound


def _distance(result: torch.Tensor, truth: torch.Tensor) -> float:
    """Returns the relative error of ``result`` in the 2-norm; infinity for NaN."""
    error = float((result.double() - truth).norm() / truth.norm().clamp(min=1e-30))
    return error if error == error else float("inf")


def _measure(
    shape: Shape,
    sound: list[Contestant],
    device: str,
    before: list[dict[str, Any]],
    console: Console,
) -> dict[str, Any] | None:
    rows, tokens = shape
    moved = rows * tokens * (2 * 4 + 8 + 2 * 4)
    memory = torch.cuda.mem_get_info()[0] if device == "cuda" else available_bytes()
    if 4 * moved > memory:
        console.print(f"{rows} x {tokens}: left out, its contestants need up to {4 * moved / 2**30:.0f} GiB")
        return None
    inputs = make_inputs(shape, device)
    bare: Inputs = (*inputs[:2], None, GAMMA, LAM)
    functions: dict[str, Callable[[], Any]] = {COPY: torch.ones(moved // 2, dtype=torch.uint8, device=device).clone}
    for contestant in sound:
        expected = expected_seconds(contestant.name, shape, before)
        if expected > LONGEST_S and shape not in GOAL_SHAPES:
            console.print(f"{rows} x {tokens}: {contestant.name} left out, it would take about {expected:.0f} s")
            continue
        functions[contestant.name] = partial(contestant.run, inputs if contestant.masked else bare)
    times = interleaved(functions, 4.0 if shape in GOAL_SHAPES else 0.5)
    return {
        "batch": rows,
        "tokens": tokens,
        "bytes_moved": moved,
        "seconds": {name: asdict(timing) for name, timing in times.items()},
        "output_bytes": rows * tokens * 8,
    }


def expected_seconds(name: str, shape: Shape, before: list[dict[str, Any]]) -> float:
    """Estimates the seconds of one call of the GAE implementation ``name`` at ``shape``; 0 if no smaller shape has been measured.

    ``before``: results so far. The seconds per token are those of the largest smaller shape.
    """
    smaller = [row for row in before if name in row["seconds"] and row["batch"] * row["tokens"] < shape[0] * shape[1]]
    if not smaller:
        return 0.0
    last = max(smaller, key=lambda row: int(row["batch"] * row["tokens"]))
    growth = shape[0] * shape[1] / (last["batch"] * last["tokens"])
    return float(last["seconds"][name]["median"] * growth)


def _median(row: dict[str, Any], name: str) -> float | None:
    return row["seconds"][name]["median"] if name in row["seconds"] else None


def _fastest_of_ours(row: dict[str, Any]) -> str | None:
    names = [name for name in row["seconds"] if name.startswith(OURS) and not name.endswith("chunk")]
    return names[0] if names else None


def _show_times(rows: list[dict[str, Any]], console: Console) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    cells = []
    for row in rows:
        cells.append([_label(row), *(_cell(row, name) for name in names)])
        ours, loop = _fastest_of_ours(row), _median(row, LOOP)
        cells[-1].append(f"{loop / row['seconds'][ours]['median']:,.0f}" if ours and loop else "")
    title = "milliseconds, median (peak memory beyond inputs and outputs, MiB); - where left out"
    show_table(console, ("B x T", *names, "loop / ours"), cells, title)


def _cell(row: dict[str, Any], name: str) -> str:
    """Returns a table cell: milliseconds of a GAE implementation at one shape, and MiB of memory beyond inputs and outputs."""
    if (median := _median(row, name)) is None:
        return "-"
    peak = None if name == COPY else row["seconds"][name]["peak_extra_bytes"]
    return f"{median * 1e3:,.2f}" + ("" if peak is None else f" ({max(peak - row['output_bytes'], 0) / 2**20:.0f})")


def _show_goals(rows: list[dict[str, Any]], console: Console) -> None:
    for row in rows:
        ours = _fastest_of_ours(row)
        if (row["batch"], row["tokens"]) not in GOAL_SHAPES or ours is None:
            continue
        our_seconds = row["seconds"][ours]["median"]
        for name, wanted in GOALS:
            other = _median(row, name)
            if other is not None:
                ratio = other / our_seconds
                console.print(
                    f"{_label(row)}: {ratio:.1f}x over {name}; goal at least {wanted:g}x: {met(ratio >= wanted)}"
                )
        share = our_seconds / row["seconds"][COPY]["median"]
        word = met(share <= COPY_GOAL)
        console.print(f"{_label(row)}: {share:.2f}x the time of a {COPY}; goal at most {COPY_GOAL:g}x: {word}")


def verdict(row: dict[str, Any]) -> str:
    """Returns one sentence that says whether rl-accel's kernel is worth enabling for the measured shape."""
    ours, loop = _fastest_of_ours(row), _median(row, LOOP)
    if ours is None or loop is None:
        return f"{_label(row)}: no verdict, a contestant is wrong."
    our_seconds = row["seconds"][ours]["median"]
    saved = loop - our_seconds
    if saved >= 0.1:
        return f"{_label(row)}: worth it, every step saves {saved:.2f} s ({loop:.2f} s become {our_seconds:.4f} s)."
    if saved >= 0:
        return f"{_label(row)}: harmless but hard to notice, a step saves {saved * 1e3:.1f} ms ({loop / our_seconds:.1f}x)."
    return f"{_label(row)}: not worth it, verl's loop is {-saved * 1e3:.1f} ms faster at this shape."


def _label(row: dict[str, Any]) -> str:
    return f"{row['batch']} x {row['tokens']}"


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    batch = 256 if any(row["batch"] == 256 for row in rows) else rows[0]["batch"]
    chosen = sorted((row for row in rows if row["batch"] == batch), key=lambda row: int(row["tokens"]))
    for name in dict.fromkeys(name for row in chosen for name in row["seconds"]):
        points = [(row["tokens"], _median(row, name)) for row in chosen if name in row["seconds"]]
        style: dict[str, Any] = {"linestyle": "--", "color": "black"} if name == COPY else {"marker": "o"}
        axes.plot(*zip(*points, strict=True), label=name, **style)
    axes.set(xscale="log", yscale="log", xlabel="tokens T", ylabel="seconds", title=f"GAE over [{batch}, T]")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=130)


def sequence_lengths(source: str) -> list[int]:
    """Returns sequence lengths in tokens from the file ``source``: whole numbers, separated by whitespace, commas or brackets.

    If ``source`` is ``lognormal``, draws 64 lengths instead; the longest is 16,384 tokens.

    Raises:
        ValueError: the file cannot be read, or holds anything but whole numbers of at least 1.
    """
    if source == LOGNORMAL:
        draw = random.Random(0)
        drawn = [draw.lognormvariate(0, _SIGMA) for _ in range(_SEQUENCES)]
        return [max(1, round(_LONGEST * length / max(drawn))) for length in drawn]
    try:
        words = re.split(r"[\s,\[\]]+", Path(source).read_text().strip(" \n\t[],"))
        lengths = [int(word) for word in words]
    except (OSError, ValueError) as error:
        raise ValueError(f"--lengths wants {LOGNORMAL} or a file of whole numbers, found {source}: {error}") from error
    if min(lengths) < 1:
        raise ValueError(f"--lengths wants whole numbers of at least 1, found {min(lengths)} in {source}")
    return lengths


def slime_padded(rewards: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Lists:
    """Computes GAE of separate sequences as slime does: pads them to [B, longest], scans chunks, and removes the padding."""
    longest = max(map(len, values))
    padded_rewards, padded_values = (values[0].new_zeros(len(values), longest) for _ in range(2))
    for row, (reward, value) in enumerate(zip(rewards, values, strict=True)):
        padded_rewards[row, : len(reward)] = reward
        padded_values[row, : len(value)] = value
    advantages, returns = slime_chunk((padded_rewards, padded_values, None, GAMMA, LAM))
    rows = range(len(values))
    return [advantages[i, : len(values[i])] for i in rows], [returns[i, : len(values[i])] for i in rows]


def bench_lengths(source: str, device: str, out: Path | None, console: Console) -> bool:
    """Measures slime's algorithm and rl-accel's kernel on one batch of sequences. Prints times, memory and ratios.

    Returns False, without measuring, if one of them gives wrong results.
    """
    lengths = sequence_lengths(source)
    generator = torch.Generator().manual_seed(0)
    rewards, values = ([torch.randn(n, generator=generator).to(device) for n in lengths] for _ in range(2))
    functions: dict[str, Callable[[], Lists]] = {
        SLIME: lambda: slime_padded(rewards, values),
        OURS: lambda: gae_of_lists(rewards, values, GAMMA, LAM),
    }
    truth = gae_of_lists([r.double() for r in rewards], [v.double() for v in values], GAMMA, LAM, backend="naive")
    errors = {}
    for name, function in functions.items():
        pairs = zip(function(), truth, strict=True)
        errors[name] = max(_distance(torch.cat(result), torch.cat(wanted)) for result, wanted in pairs)
    for name, error in errors.items():
        word = "correct" if error < _TOLERANCE else "[red]WRONG"
        console.print(f"{word}: {name}, {error:.1e} from the loop in float64")
    if max(errors.values()) >= _TOLERANCE:
        return False
    padding = len(lengths) * max(lengths) / sum(lengths)
    console.print(
        f"{len(lengths)} sequences, {sum(lengths):,} tokens, the longest {max(lengths):,}: padded {padding:.1f}x"
    )
    timings = interleaved(functions, _LENGTHS_BUDGET_S)
    _give_memory_back()
    peaks = {name: peak_extra_bytes(function) for name, function in functions.items()}
    rows = []
    for name, timing in timings.items():
        memory = "-" if (peak := peaks[name]) is None else f"{peak / 2**20:,.1f}"
        rows.append((name, f"{timing.median * 1e3:,.2f}", memory))
    show_table(console, ("", "milliseconds", "extra memory, MiB"), rows)
    results: dict[str, Any] = {"device": device, "lengths": lengths, "padding": padding}
    results["time"] = timings[SLIME].median / timings[OURS].median
    word = met(results["time"] >= LENGTHS_GOAL)
    console.print(f"time: {results['time']:.1f}x less; goal at least {LENGTHS_GOAL:g}x: {word}")
    slime_peak, our_peak = peaks[SLIME], peaks[OURS]
    if slime_peak is not None and our_peak:
        results["memory"] = slime_peak / our_peak
        word = met(results["memory"] >= padding)
        console.print(f"memory: {results['memory']:.1f}x less; goal at least the padding, {padding:.1f}x: {word}")
    if out is not None:
        results["seconds"] = {name: timing.median for name, timing in timings.items()}
        results_file(out, "gae_lengths.json", results, console)
    return True


def _give_memory_back() -> None:
    """Makes the C library return freed memory to the system at once, so that the memory of small tensors is measured."""
    with contextlib.suppress(OSError, AttributeError):  # no glibc: memory of small tensors is not counted
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, 1 << 16)
        library.malloc_trim(0)
