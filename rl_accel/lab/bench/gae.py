"""``rl-accel bench gae``: GAE kernels side by side in one process, correctness first, a plain copy of the same bytes as floor."""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from rl_accel.lab.bench.contestants import CHUNK_128, LOOP, OURS, Contestant, Inputs, contestants
from rl_accel.lab.bench.gae_lengths import bench_lengths
from rl_accel.lab.bench.measure import available_bytes, interleaved
from rl_accel.ops import gae

BATCHES, TOKENS = (1, 8, 64, 256, 1024), (1024, 8192, 32768, 131072)
QUICK = ((8, 1024), (64, 8192))
GOAL_SHAPES = ((256, 32768), (256, 131072))
GOALS = ((LOOP, 60.0), (CHUNK_128, 4.0))
COPY_GOAL = 1.5
COPY, IN_PLACE = "plain copy", "copy in place"
"""The floor: ``clone()``, into new memory, where every contestant returns its results. In place: into memory in use before."""
LONGEST_S = 20.0
"""A contestant expected to take longer for one call is left out, unless a goal needs its time."""
GAMMA, LAM = 0.99, 0.95
_QUADRATIC_WORK = 2e9
_TOLERANCE = 1e-4
_MASKS = {"int64": torch.int64, "float32": torch.float32, "bool": torch.bool}

Shape = tuple[int, int]


@click.command("gae")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for gae.json and gae.png.")
@click.option("--batch", type=click.IntRange(min=1), help="Only this batch size, and a verdict in one sentence.")
@click.option("--tokens", type=click.IntRange(min=1), help="Only this response length; goes with --batch.")
@click.option(
    "--lengths", metavar="FILE", help="Only a batch of these lengths, against slime's padding; or: lognormal."
)
@click.option("--quick", is_flag=True, help="Two small shapes only.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option(
    "--mask-dtype", type=click.Choice(list(_MASKS)), default="int64", show_default=True, help="verl's is int64."
)
def bench_gae(
    out: Path | None,
    batch: int | None,
    tokens: int | None,
    lengths: str | None,
    quick: bool,
    device: str,
    mask_dtype: str,
) -> None:
    """Time GAE kernels against verl's loop (its recurrence, without the whitening that all would share).

    A contestant that gives wrong results gets no number and makes the exit status 1. Goals that are not met are shown and do not
    change it: machines are shared and noisy.
    """
    if (batch is None) != (tokens is None):
        raise click.UsageError("--batch and --tokens go together")
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device cuda: torch sees no CUDA device here")
    console = Console(width=None if Console().is_terminal else 160)
    if lengths is not None:
        try:
            right = bench_lengths(lengths, device, out, console)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        raise SystemExit(0 if right else 1)
    sound = _gate(contestants(device), device, _MASKS[mask_dtype], console)
    shapes: list[Shape] = [(b, t) for t in TOKENS for b in BATCHES]
    if batch is not None and tokens is not None:
        shapes = [(batch, tokens)]
    elif quick:
        shapes = list(QUICK)
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        found = _measure(shape, sound, device, _MASKS[mask_dtype], rows, console)
        rows += [] if found is None else [found]
    _show(rows, console)
    if batch is not None and rows:
        console.print(verdict(rows[0]))
    _show_goals(rows, console)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "gae.json").write_text(json.dumps({"device": device, "mask": mask_dtype, "shapes": rows}, indent=1))
        _plot(rows, out / "gae.png")
        console.print(f"{out / 'gae.json'}, {out / 'gae.png'}", soft_wrap=True)
    if len(sound) < len(contestants(device)):
        raise SystemExit(1)


def make_inputs(shape: Shape, device: str, mask_dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Random rewards and values [B, T] and a ragged mask with holes, as a batch of multi-turn responses has them."""
    random = torch.Generator().manual_seed(seed)
    rows, tokens = shape
    rewards = torch.randn(rows, tokens, generator=random)
    values = torch.randn(rows, tokens, generator=random)
    lengths = torch.randint(tokens // 2, tokens + 1, (rows, 1), generator=random)
    mask = torch.arange(tokens) < lengths
    mask &= torch.arange(tokens) % 64 != 7
    return rewards.to(device), values.to(device), mask.to(device, mask_dtype), GAMMA, LAM


def _gate(found: list[Contestant], device: str, mask_dtype: torch.dtype, console: Console) -> list[Contestant]:
    """Return the contestants that agree with the loop in float64 (and bit for bit where they promise to)."""
    sound = []
    for contestant in found:
        worst, exact = 0.0, True
        for seed, shape in enumerate([(1, 1), (3, 5), (33, 1500), (2, 4099)]):
            inputs = make_inputs(shape, device, mask_dtype, seed)
            inputs = inputs if contestant.masked else (*inputs[:2], None, GAMMA, LAM)
            truth = gae(inputs[0].double(), inputs[1].double(), *inputs[2:], backend="naive")
            try:
                result = contestant.run(inputs)
            except Exception as error:  # whatever a contestant does wrong is its result, not the benchmark's end
                console.print(f"[red]{contestant.name}: {error}", markup=True)
                worst = float("inf")
                break
            worst = max(worst, _distance(result, truth))
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


def _distance(found: tuple[torch.Tensor, torch.Tensor], truth: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The largest relative error in the 2-norm; NaN counts as infinite."""
    errors = [float((a.double() - b).norm() / b.norm().clamp(min=1e-30)) for a, b in zip(found, truth, strict=True)]
    return max(error if error == error else float("inf") for error in errors)


def _measure(
    shape: Shape,
    found: list[Contestant],
    device: str,
    mask_dtype: torch.dtype,
    before: list[dict[str, Any]],
    console: Console,
) -> dict[str, Any] | None:
    rows, tokens = shape
    moved = rows * tokens * (2 * 4 + torch.empty(0, dtype=mask_dtype).element_size() + 2 * 4)
    memory = torch.cuda.mem_get_info()[0] if device == "cuda" else available_bytes()
    if 4 * moved > memory:
        console.print(f"{rows} x {tokens}: left out, its contestants need up to {4 * moved / 2**30:.0f} GiB")
        return None
    inputs = make_inputs(shape, device, mask_dtype)
    bare: Inputs = (*inputs[:2], None, GAMMA, LAM)
    functions = _copies(moved // 2, device)
    for contestant in found:
        work, expected = rows * tokens * tokens, _expected(contestant.name, shape, before)
        if contestant.quadratic and (work > _QUADRATIC_WORK or 24 * tokens * tokens > memory):
            console.print(f"{rows} x {tokens}: {contestant.name} left out, it grows with T^2: {work:.0e} products")
            continue
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


def _copies(size: int, device: str) -> dict[str, Callable[[], Any]]:
    """Copies of ``size`` bytes, which read and write as much as any GAE must: rewards, values, mask, advantages, returns."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    return {COPY: source.clone, IN_PLACE: partial(torch.ones_like(source).copy_, source)}


def _expected(name: str, shape: Shape, before: list[dict[str, Any]]) -> float:
    """Seconds that one call is likely to take, judged by the nearest smaller shape in which it ran."""
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


def _show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table("B x T", title="milliseconds, median (peak memory beyond inputs and outputs, MiB); - where left out")
    names = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("loop / ours", justify="right")
    for row in rows:
        cells = []
        for name in names:
            median = _median(row, name)
            peak = row["seconds"].get(name, {}).get("peak_extra_bytes")
            if name == COPY:
                peak = None
            extra = "" if peak is None else f" ({max(peak - row['output_bytes'], 0) / 2**20:.0f})"
            cells.append("-" if median is None else f"{median * 1e3:,.2f}{extra}")
        ours, loop = _fastest_of_ours(row), _median(row, LOOP)
        ratio = f"{loop / row['seconds'][ours]['median']:,.0f}" if ours and loop else ""
        table.add_row(f"{row['batch']} x {row['tokens']}", *cells, ratio)
    console.print(table)


def _show_goals(rows: list[dict[str, Any]], console: Console) -> None:
    for row in rows:
        ours = _fastest_of_ours(row)
        if (row["batch"], row["tokens"]) not in GOAL_SHAPES or ours is None:
            continue
        mine = row["seconds"][ours]["median"]
        for name, wanted in GOALS:
            other = _median(row, name)
            if other is not None:
                word = "met" if other / mine >= wanted else "NOT met"
                console.print(f"{_label(row)}: {other / mine:.1f}x over {name}; goal at least {wanted:g}x: {word}")
        share = mine / row["seconds"][COPY]["median"]
        word = "met" if share <= COPY_GOAL else "NOT met"
        console.print(f"{_label(row)}: {share:.2f}x the time of a {COPY}; goal at most {COPY_GOAL:g}x: {word}")
        harder = mine / row["seconds"][IN_PLACE]["median"]
        console.print(f"{_label(row)}: {harder:.2f}x the time of a {IN_PLACE}, which takes no new memory; no goal")


def verdict(row: dict[str, Any]) -> str:
    """Say in one sentence whether enabling is worth it for the measured shape."""
    ours, loop = _fastest_of_ours(row), _median(row, LOOP)
    if ours is None or loop is None:
        return f"{_label(row)}: no verdict, a contestant is wrong."
    mine = row["seconds"][ours]["median"]
    saved = loop - mine
    if saved >= 0.1:
        return f"{_label(row)}: worth it, every step saves {saved:.2f} s ({loop:.2f} s become {mine:.4f} s)."
    if saved >= 0:
        return f"{_label(row)}: harmless but hard to notice, a step saves {saved * 1e3:.1f} ms ({loop / mine:.1f}x)."
    return f"{_label(row)}: not worth it, verl's loop is {-saved * 1e3:.1f} ms faster at this shape."


def _label(row: dict[str, Any]) -> str:
    return f"{row['batch']} x {row['tokens']}"


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5.5), layout="constrained")
    batch = 256 if any(row["batch"] == 256 for row in rows) else rows[0]["batch"]
    chosen = sorted((row for row in rows if row["batch"] == batch), key=lambda row: int(row["tokens"]))
    for name in dict.fromkeys(name for row in chosen for name in row["seconds"]):
        points = [(row["tokens"], _median(row, name)) for row in chosen if name in row["seconds"]]
        lines = {COPY: "--", IN_PLACE: ":"}
        style: dict[str, Any] = {"linestyle": lines[name], "color": "black"} if name in lines else {"marker": "o"}
        axes.plot(*zip(*points, strict=True), label=name, **style)
    axes.set(xscale="log", yscale="log", xlabel="tokens T", ylabel="seconds", title=f"GAE over [{batch}, T]")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
