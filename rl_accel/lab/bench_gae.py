"""Command ``rl-accel bench gae``: checks GAE kernels for correctness and then times them in one process."""

import importlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track

from rl_accel.console import show_table, wide_console
from rl_accel.ops import gae

LOOP = "verl's loop"
CHUNK_128 = "slime chunk 128"
OURS = "rl-accel"
COPY = "plain copy"
"""Lower bound of the time: a copy that reads and writes as many bytes in total as GAE."""
BATCHES = (1, 8, 64, 256)
TOKENS = (1024, 8192, 32768, 131072)
GOAL_SHAPE = (256, 32768)
GOALS = ((LOOP, 80.0), (CHUNK_128, 4.0), (COPY, 0.5))
"""Goals at GOAL_SHAPE: the minimum ratio of another implementation's time to rl-accel's time."""
BUDGET_S = 2.0
"""Seconds of calls after which an implementation is timed no more; each is timed three to seven times."""
BYTES_PER_TOKEN = 2 * 4 + 8 + 2 * 4
"""Bytes that GAE reads and writes for a token: rewards, values and mask, advantages and returns."""
GAMMA = 0.99
LAM = 0.95
TOLERANCE = 1e-4
"""Maximum relative error of a result in float32, compared with float64. Rounding stays far below; a wrong formula exceeds it."""

Result = tuple[torch.Tensor, torch.Tensor]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, float, float]
"""Rewards and values [B, T], a mask [B, T] or None, gamma and lambda."""
Shape = tuple[int, int]
Seconds = dict[str, float]
"""Mapping from implementation to the median seconds of a call."""


@dataclass(frozen=True)
class Contestant:
    """A GAE implementation in the comparison.

    Attributes:
        is_masked: whether ``run`` applies verl's response mask. If False, ``run`` ignores the mask.
        is_exact: whether the result must equal the result of verl's loop bit for bit.
    """

    name: str
    run: Callable[[Inputs], Result]
    is_masked: bool = True
    is_exact: bool = False


def run(out: Path | None, batch: int | None, tokens: int | None, device: str) -> bool:
    """Runs the command; its help text explains the arguments. Returns False if an implementation gives wrong results.

    Raises:
        click.UsageError: the arguments do not fit together, or not this machine.
    """
    if (batch is None) != (tokens is None):
        raise click.UsageError("--batch and --tokens go together")
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device cuda: torch sees no CUDA device here")
    console = wide_console()
    if out is not None:
        importlib.import_module("matplotlib")  # a missing module must fail before minutes of measuring, not after
        out.mkdir(parents=True, exist_ok=True)
    candidates = contestants(device)
    sound = [contestant for contestant in candidates if _is_correct(contestant, device, console)]
    shapes = [(b, t) for t in TOKENS for b in BATCHES] if batch is None or tokens is None else [(batch, tokens)]
    results = {shape: _time_shape(shape, sound, device) for shape in track(shapes, transient=True, console=console)}
    _show(results, console)
    if batch is not None:
        for shape, seconds in results.items():
            console.print(verdict(shape, seconds))
    if out is not None:
        _plot(results, out / "gae.png")
        console.print(str(out / "gae.png"), soft_wrap=True, markup=False)
    return len(sound) == len(candidates)


def contestants(device: str) -> list[Contestant]:
    """Returns the GAE implementations to compare for tensors on ``device``: verl's loop first, rl-accel's fastest kernel second."""
    fastest = "triton" if device == "cuda" else "numba"
    return [
        Contestant(LOOP, lambda inputs: gae(*inputs, backend="naive"), is_exact=True),
        Contestant(OURS, lambda inputs: gae(*inputs, backend=fastest), is_exact=fastest == "numba"),
        Contestant(f"{OURS} chunk", lambda inputs: gae(*inputs, backend="chunk")),
        Contestant(CHUNK_128, slime_chunk, is_masked=False),
    ]


def slime_chunk(inputs: Inputs, chunk: int = 128) -> Result:
    """Computes GAE by slime's chunk scan (slime pull request 850), without a mask: multiplies each chunk of reversed tokens by one
    matrix, and passes the running advantage on to the next chunk."""
    rewards, values, _, gamma, lam = inputs
    rows, tokens = rewards.shape
    decay = gamma * lam
    following = torch.nn.functional.pad(values[:, 1:], (0, 1))
    deltas = rewards + gamma * following - values
    blocks = torch.nn.functional.pad(deltas.flip(1), (0, -tokens % chunk)).view(rows, -1, chunk)
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


def make_inputs(shape: Shape, device: str, seed: int = 0) -> Inputs:
    """Returns random inputs. The mask has zeros after the random length of each response, and single zeros within it, as between
    the turns of a dialogue."""
    generator = torch.Generator().manual_seed(seed)
    rows, tokens = shape
    rewards, values = (torch.randn(rows, tokens, generator=generator).to(device) for _ in range(2))
    lengths = torch.randint(tokens // 2, tokens + 1, (rows, 1), generator=generator)
    mask = (torch.arange(tokens) < lengths) & (torch.arange(tokens) % 64 != 7)
    return rewards, values, mask.long().to(device), GAMMA, LAM


def _is_correct(contestant: Contestant, device: str, console: Console) -> bool:
    """Returns whether a contestant agrees with verl's loop in float64 and, if exact, in the bits of float32. Prints its error."""
    errors: list[float] = []
    has_same_bits = True
    try:
        for seed, shape in enumerate([(1, 1), (3, 5), (33, 1500), (2, 4099)]):
            rewards, values, mask, gamma, lam = make_inputs(shape, device, seed)
            if not contestant.is_masked:
                mask = None
            truth = gae(rewards.double(), values.double(), mask, gamma, lam, backend="naive")
            result = contestant.run((rewards, values, mask, gamma, lam))
            errors += map(_error, result, truth)
            if contestant.is_exact:
                loop = gae(rewards, values, mask, gamma, lam, backend="naive")
                has_same_bits = has_same_bits and all(map(torch.equal, result, loop))
    except Exception as error:  # a contestant that fails must not end the benchmark
        console.print(f"WRONG: {contestant.name}: {error}", style="red", markup=False)
        return False
    if max(errors) >= TOLERANCE or not has_same_bits:
        console.print(f"[red]WRONG: {contestant.name} is {max(errors):.1e} from float64, same bits: {has_same_bits}")
        return False
    kind = "equals the loop bit for bit" if contestant.is_exact else "agrees with the loop"
    console.print(f"correct: {contestant.name} {kind}; {max(errors):.1e} from float64")
    return True


def _error(result: torch.Tensor, truth: torch.Tensor) -> float:
    """Returns the relative error of ``result`` in the 2-norm; infinity for NaN."""
    error = float((result.double() - truth).norm() / truth.norm().clamp(min=1e-30))
    return error if error == error else float("inf")


def median_seconds(functions: Mapping[str, Callable[[], Any]]) -> Seconds:
    """Times ``functions`` in turn, round after round, so that a change of the machine's speed affects all of them.

    A function is called once to warm up. If that takes longer than BUDGET_S, it is the only call, and counts.
    """
    seconds = {name: [_seconds_of(function)] for name, function in functions.items()}
    for turn in range(7):
        for name, function in functions.items():
            if turn == 0 and seconds[name][0] <= BUDGET_S:
                seconds[name] = []
            if sum(seconds[name]) <= BUDGET_S:
                seconds[name].append(_seconds_of(function))
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def _seconds_of(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    result = function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    del result
    return seconds


def _time_shape(shape: Shape, sound: Sequence[Contestant], device: str) -> Seconds:
    inputs = make_inputs(shape, device)
    source = torch.ones(shape[0] * shape[1] * BYTES_PER_TOKEN // 2, dtype=torch.uint8, device=device)
    functions: dict[str, Callable[[], Any]] = {COPY: source.clone}
    for contestant in sound:
        functions[contestant.name] = partial(contestant.run, inputs)
    return median_seconds(functions)


def _show(results: Mapping[Shape, Seconds], console: Console) -> None:
    names = list(dict.fromkeys(name for seconds in results.values() for name in seconds))
    rows = []
    for (batch, tokens), seconds in results.items():
        cells = [f"{seconds[name] * 1e3:,.2f}" if name in seconds else "-" for name in names]
        speedup = f"{seconds[LOOP] / seconds[OURS]:,.0f}x" if LOOP in seconds and OURS in seconds else "-"
        rows.append((f"{batch} x {tokens}", *cells, speedup))
    show_table(console, ("B x T", *names, "loop / ours"), rows, "milliseconds, median; - where left out")
    seconds = results.get(GOAL_SHAPE, {})
    for name, wanted in GOALS:
        if name in seconds and OURS in seconds:
            ratio = seconds[name] / seconds[OURS]
            outcome = "met" if ratio >= wanted else "NOT met"
            console.print(f"{name} takes {ratio:.1f} times as long as ours; goal at least {wanted:g}: {outcome}")


def verdict(shape: Shape, seconds: Seconds) -> str:
    """Returns a sentence that says whether rl-accel's kernel is worth enabling at the measured shape."""
    label = f"{shape[0]} x {shape[1]}"
    if LOOP not in seconds or OURS not in seconds:
        return f"{label}: no verdict, a contestant is wrong."
    saved = seconds[LOOP] - seconds[OURS]
    if saved >= 0.1:
        return f"{label}: worth it, every step saves {saved:.2f} s."
    if saved >= 0:
        return f"{label}: harmless but hard to notice, a step saves {saved * 1e3:.1f} ms."
    return f"{label}: not worth it, verl's loop is {-saved * 1e3:.1f} ms faster at this shape."


def _plot(results: Mapping[Shape, Seconds], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    batches = [batch for batch, _ in results]
    batch = GOAL_SHAPE[0] if GOAL_SHAPE[0] in batches else batches[0]
    chosen = {tokens: seconds for (rows, tokens), seconds in results.items() if rows == batch}
    for name in dict.fromkeys(name for seconds in chosen.values() for name in seconds):
        lengths = [tokens for tokens, seconds in chosen.items() if name in seconds]
        style = "k--" if name == COPY else "o-"
        axes.plot(lengths, [chosen[tokens][name] for tokens in lengths], style, label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens T", ylabel="seconds", title=f"GAE over [{batch}, T]")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=130)
