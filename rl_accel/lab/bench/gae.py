"""Command ``rl-accel bench gae``: checks GAE kernels for correctness and then times the kernels in one process.

With ``--lengths``, the input is one batch of responses of very different lengths. slime pads every sequence to the longest in a
Python loop, scans chunks of 128 tokens one after the other, and cuts off the padding. rl-accel's kernel needs no padding.
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
from rl_accel.lab.bench.helpers import available_bytes, interleaved, met, out_option, peak_extra_bytes, results_file
from rl_accel.ops import gae, gae_of_lists

LOOP, CHUNK_128, OURS, SLIME = "verl's loop", "slime chunk 128", "rl-accel", "slime, padded"
BATCHES, TOKENS = (1, 8, 64, 256, 1024), (1024, 8192, 32768, 131072)
COPY = "plain copy"
"""Name of the lower bound of the time: a copy that reads and writes as many bytes in total as GAE."""
GOAL_SHAPES = ((256, 32768), (256, 131072))
GOALS = ((LOOP, 60.0), (CHUNK_128, 4.0))
"""Goals at GOAL_SHAPES: pairs of another implementation and the minimum ratio of its time to rl-accel's time. Chosen by hand."""
COPY_GOAL = 1.5
"""Goal at GOAL_SHAPES: maximum ratio of rl-accel's time to the time of a plain copy. Chosen by hand."""
LENGTHS_GOAL = 10.0
"""Goal with ``--lengths``: minimum ratio of slime's time to rl-accel's time. Chosen by hand."""
LONGEST_S = 20.0
"""Maximum expected seconds of a call of a GAE implementation. A slower implementation is not timed, except at GOAL_SHAPES, so that
the benchmark takes minutes."""
GAMMA, LAM = 0.99, 0.95
_TOLERANCE = 1e-4
"""Maximum relative error of a result in float32, compared with float64. Rounding stays far below; a wrong formula exceeds it."""
_M_MMAP_THRESHOLD = -3
"""glibc's number for this setting of its function ``mallopt``. Tensors of at least the set size get their memory directly from the
system."""

Shape = tuple[int, int]
Result = tuple[torch.Tensor, torch.Tensor]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, float, float]
Lists = tuple[list[torch.Tensor], list[torch.Tensor]]


@dataclass(frozen=True)
class Contestant:
    """A GAE implementation in the comparison.

    Attributes:
        masked: whether ``run`` applies verl's response mask. If False, ``run`` ignores the mask.
        exact: whether the result must equal the result of verl's loop bit for bit.
    """

    name: str
    run: Callable[[Inputs], Result]
    masked: bool
    exact: bool = False


def slime_chunk(inputs: Inputs, chunk: int = 128) -> Result:
    """Computes GAE by slime's chunk scan (slime pull request 850), without a mask: multiplies each chunk of reversed tokens by one
    matrix, and passes the running advantage on to the next chunk."""
    rewards, values, _, gamma, lam = inputs
    rows, tokens = rewards.shape
    decay = gamma * lam
    following = torch.nn.functional.pad(values[:, 1:], (0, 1))
    deltas = rewards + gamma * following - values
    padded = torch.nn.functional.pad(deltas.flip(1), (0, -tokens % chunk))
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

    def ours(backend: str) -> Callable[[Inputs], Result]:
        return lambda inputs: gae(*inputs, backend=backend)

    fastest = "triton" if device == "cuda" else "numba"
    return [
        Contestant(LOOP, ours("naive"), masked=True, exact=True),
        Contestant(f"{OURS} {fastest}", ours(fastest), masked=True, exact=fastest == "numba"),
        Contestant(f"{OURS} chunk", ours("chunk"), masked=True),
        Contestant(CHUNK_128, slime_chunk, masked=False),
    ]


@click.command("gae")
@out_option("gae.json and gae.png")
@click.option("--batch", type=click.IntRange(min=1), help="Only this batch size, and a verdict in one sentence.")
@click.option("--tokens", type=click.IntRange(min=1), help="Only this response length; goes with --batch.")
@click.option("--lengths", metavar="FILE", help="Only a batch of these lengths, against slime; or: lognormal.")
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
        rows += _measure(shape, sound, device, rows, console)
    _show_times(rows, console)
    if batch is not None and rows:
        console.print(verdict(rows[0]))
    _show_goals(rows, console)
    results_file(out, "gae.json", {"device": device, "shapes": rows}, console)
    if out is not None:
        _plot(rows, out / "gae.png")
    if len(sound) < len(contestants(device)):
        raise SystemExit(1)


def make_inputs(shape: Shape, device: str, seed: int = 0) -> Inputs:
    """Returns random rewards and values [B, T], a mask [B, T], gamma and lambda.

    The mask has zeros after the random length of each response, and single zeros within it, as between the turns of a dialogue.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, tokens = shape
    rewards, values = (torch.randn(rows, tokens, generator=generator) for _ in range(2))
    lengths = torch.randint(tokens // 2, tokens + 1, (rows, 1), generator=generator)
    mask = torch.arange(tokens) < lengths
    mask &= torch.arange(tokens) % 64 != 7
    return rewards.to(device), values.to(device), mask.long().to(device), GAMMA, LAM


def _correct_contestants(candidates: list[Contestant], device: str, console: Console) -> list[Contestant]:
    """Returns the GAE implementations that agree with verl's loop in float64, and prints the errors of all.

    Implementations with ``exact`` must also equal verl's loop in float32 bit for bit.
    """
    sound = []
    for contestant in candidates:
        worst, same_bits = 0.0, True
        try:
            for seed, shape in enumerate([(1, 1), (3, 5), (33, 1500), (2, 4099)]):
                inputs = make_inputs(shape, device, seed)
                inputs = inputs if contestant.masked else (*inputs[:2], None, GAMMA, LAM)
                truth = gae(inputs[0].double(), inputs[1].double(), *inputs[2:], backend="naive")
                result = contestant.run(inputs)
                worst = max(worst, *map(_distance, result, truth))
                if contestant.exact:
                    same_bits &= all(map(torch.equal, result, gae(*inputs, backend="naive")))
        except Exception as error:  # a contestant that fails must not end the benchmark
            console.print(f"{contestant.name}: {error}", style="red", markup=False)
            worst = float("inf")
        found = f"{worst:.1e} from float64"
        if worst < _TOLERANCE and same_bits:
            sound.append(contestant)
            kind = "equals the loop bit for bit" if contestant.exact else "agrees with the loop"
            console.print(f"correct: {contestant.name} {kind}; {found}")
        else:
            console.print(f"[red]WRONG: {contestant.name} is {found}, bit-identical: {same_bits}; no numbers")
    return sound


def _distance(result: torch.Tensor, truth: torch.Tensor) -> float:
    """Returns the relative error of ``result`` in the 2-norm; infinity for NaN."""
    error = float((result.double() - truth).norm() / truth.norm().clamp(min=1e-30))
    return error if error == error else float("inf")


def _measure(
    shape: Shape, sound: list[Contestant], device: str, before: list[dict[str, Any]], console: Console
) -> list[dict[str, Any]]:
    """Times the ``sound`` GAE implementations at ``shape``. Returns one result, or none if the memory does not suffice.

    ``before``: results at earlier shapes. Implementations that these show to be too slow are not timed.
    """
    rows, tokens = shape
    moved = rows * tokens * (2 * 4 + 8 + 2 * 4)
    memory = torch.cuda.mem_get_info()[0] if device == "cuda" else available_bytes()
    if 4 * moved > memory:
        console.print(f"{rows} x {tokens}: left out, its contestants need up to {4 * moved / 2**30:.0f} GiB")
        return []
    inputs = make_inputs(shape, device)
    functions: dict[str, Callable[[], Any]] = {COPY: torch.ones(moved // 2, dtype=torch.uint8, device=device).clone}
    for contestant in sound:
        expected = expected_seconds(contestant.name, shape, before)
        if expected > LONGEST_S and shape not in GOAL_SHAPES:
            console.print(f"{rows} x {tokens}: {contestant.name} left out, it would take about {expected:.0f} s")
            continue
        functions[contestant.name] = partial(contestant.run, inputs)
    times = interleaved(functions, 4.0 if shape in GOAL_SHAPES else 0.5)
    seconds = {name: asdict(timing) for name, timing in times.items()}
    sizes = {"batch": rows, "tokens": tokens, "bytes_moved": moved, "output_bytes": rows * tokens * 8}
    return [{**sizes, "seconds": seconds}]


def expected_seconds(name: str, shape: Shape, before: list[dict[str, Any]]) -> float:
    """Estimates the seconds of one call of a GAE implementation at ``shape`` from the largest smaller shape in ``before``, the
    results so far. Returns 0 if no smaller shape has been measured."""
    smaller = [row for row in before if name in row["seconds"] and row["batch"] * row["tokens"] < shape[0] * shape[1]]
    if not smaller:
        return 0.0
    last = max(smaller, key=lambda row: int(row["batch"] * row["tokens"]))
    growth = shape[0] * shape[1] / (last["batch"] * last["tokens"])
    return float(last["seconds"][name]["median"] * growth)


def _median(row: dict[str, Any], name: str) -> float | None:
    return row["seconds"][name]["median"] if name in row["seconds"] else None


def _ours_and_loop(row: dict[str, Any]) -> tuple[float | None, float | None]:
    """Returns the median seconds of rl-accel's fastest kernel and of verl's loop; None for one that was not measured."""
    names = (name for name in row["seconds"] if name.startswith(OURS) and not name.endswith("chunk"))
    return _median(row, next(names, "")), _median(row, LOOP)


def _show_times(rows: list[dict[str, Any]], console: Console) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    cells = []
    for row in rows:
        ours, loop = _ours_and_loop(row)
        ratio = f"{loop / ours:,.0f}" if ours and loop else ""
        cells.append((_label(row), *(_cell(row, name) for name in names), ratio))
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
        ours, _ = _ours_and_loop(row)
        if (row["batch"], row["tokens"]) not in GOAL_SHAPES or ours is None:
            continue
        for name, wanted in GOALS:
            if (other := _median(row, name)) is not None:
                ratio = other / ours
                goal = f"goal at least {wanted:g}x: {met(ratio >= wanted)}"
                console.print(f"{_label(row)}: {ratio:.1f}x over {name}; {goal}")
        share = ours / row["seconds"][COPY]["median"]
        goal = f"goal at most {COPY_GOAL:g}x: {met(share <= COPY_GOAL)}"
        console.print(f"{_label(row)}: {share:.2f}x the time of a {COPY}; {goal}")


def verdict(row: dict[str, Any]) -> str:
    """Returns a sentence that says whether rl-accel's kernel is worth enabling at the measured shape."""
    ours, loop = _ours_and_loop(row)
    if ours is None or loop is None:
        return f"{_label(row)}: no verdict, a contestant is wrong."
    saved = loop - ours
    if saved >= 0.1:
        return f"{_label(row)}: worth it, every step saves {saved:.2f} s ({loop:.2f} s become {ours:.4f} s)."
    if saved >= 0:
        return f"{_label(row)}: harmless but hard to notice, a step saves {saved * 1e3:.1f} ms ({loop / ours:.1f}x)."
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

    If ``source`` is ``lognormal``, draws 64 lengths instead, of which the longest is 16,384 tokens.

    Raises:
        ValueError: the file cannot be read, or holds anything but whole numbers of at least 1.
    """
    if source == "lognormal":
        rng = random.Random(0)
        drawn = [rng.lognormvariate(0, 1.5) for _ in range(64)]
        return [max(1, round(16384 * length / max(drawn))) for length in drawn]
    try:
        words = re.split(r"[\s,\[\]]+", Path(source).read_text().strip(" \n\t[],"))
        lengths = [int(word) for word in words]
    except (OSError, ValueError) as error:
        raise ValueError(f"--lengths wants lognormal or a file of whole numbers, found {source}: {error}") from error
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

    ``source``: see :func:`sequence_lengths`. Returns False, without measuring, if a result is wrong.
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
        word = "correct" if errors[name] < _TOLERANCE else "[red]WRONG"
        console.print(f"{word}: {name}, {errors[name]:.1e} from the loop in float64")
    if max(errors.values()) >= _TOLERANCE:
        return False
    padding = len(lengths) * max(lengths) / sum(lengths)
    console.print(
        f"{len(lengths)} sequences, {sum(lengths):,} tokens, the longest {max(lengths):,}: padded {padding:.1f}x"
    )
    timings = interleaved(functions, budget_s=5.0)
    _give_memory_back()
    peaks = {name: peak_extra_bytes(function) for name, function in functions.items()}
    mebibytes = {name: "-" if peak is None else f"{peak / 2**20:,.1f}" for name, peak in peaks.items()}
    rows = [(name, f"{timing.median * 1e3:,.2f}", mebibytes[name]) for name, timing in timings.items()]
    show_table(console, ("", "milliseconds", "extra memory, MiB"), rows)
    seconds = {name: timing.median for name, timing in timings.items()}
    ratio = seconds[SLIME] / seconds[OURS]
    console.print(f"time: {ratio:.1f}x less; goal at least {LENGTHS_GOAL:g}x: {met(ratio >= LENGTHS_GOAL)}")
    results = {"device": device, "lengths": lengths, "padding": padding, "time": ratio, "seconds": seconds}
    slime_peak, our_peak = peaks[SLIME], peaks[OURS]
    if slime_peak is not None and our_peak:
        results["memory"] = less = slime_peak / our_peak
        console.print(f"memory: {less:.1f}x less; goal at least the padding, {padding:.1f}x: {met(less >= padding)}")
    results_file(out, "gae_lengths.json", results, console)
    return True


def _give_memory_back() -> None:
    """Makes the C library return freed memory at once. Otherwise, a memory measurement misses small tensors, which reuse memory."""
    with contextlib.suppress(OSError, AttributeError):  # no glibc: memory of small tensors is not counted
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, 1 << 16)
        library.malloc_trim(0)
