"""``rl-accel bench drafts``: what drafts would have done in a run that is over, by its rollout files, without an engine."""

import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from rl_accel.drafts.drafter import SETTINGS, Drafter
from rl_accel.drafts.index import SOURCES
from rl_accel.lab.bench.measure import console_of_benchmark

Response = tuple[list[int], list[int]]
"""The tokens of a prompt, and of a response to it."""


def _step_seconds(_: Any, __: Any, value: str | None) -> Callable[[int], float] | None:
    if value is None:
        return None
    try:
        pairs = sorted(
            (int(count), float(seconds)) for count, seconds in (pair.split(":") for pair in value.split(","))
        )
    except ValueError:
        raise click.BadParameter(
            f"wanted pairs of requests and seconds as in 1:0.02,64:0.04, found {value!r}"
        ) from None
    counts, seconds = zip(*pairs, strict=True)
    return lambda running: float(np.interp(running, counts, seconds))


def _count(name: str, default: int, text: str, least: int = 1) -> Any:
    return click.option(name, type=click.IntRange(min=least), default=default, show_default=True, help=text)


@click.command("drafts")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--tokenizer", type=click.Path(exists=True, file_okay=False), help="Its folder; else characters are tokens."
)
@click.option("--step-seconds", callback=_step_seconds, help="Of a step by running requests, as in 1:0.02,64:0.04.")
@_count("--running", 64, "Requests that run at once.")
@_count("--max-tokens", 8, "Longest draft.")
@_count("--batch-limit", 32, "Running requests above which nothing is drafted.")
@_count("--memory-mb", 200, "MiB of history.")
@_count("--epochs", 2, "Earlier epochs whose responses are used.", least=0)
@click.option("--fill", is_flag=True, help="First fill the history with random responses to other prompts.")
def bench_drafts(
    files: tuple[Path, ...], tokenizer: str | None, step_seconds: Any, running: int, fill: bool, **settings: int
) -> None:
    """Replay FILES of verl's trainer.rollout_data_dir through the drafter.

    The responses of a training step run at once on one replica, --running of them, the others as places become free. Tokens
    are those of the text. A step takes as long with drafts as without, and reading a prompt no time.
    """
    encode = _encoder(tokenizer)
    steps: dict[int, list[Response]] = defaultdict(list)
    for path in files:
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
                steps[int(row["step"])].append((encode(row["input"]), encode(row["output"])))
            except (ValueError, KeyError, TypeError) as error:
                raise click.ClickException(f"{path}: wanted lines with input, output and step: {error!r}") from error
    counts, epochs, stock, ours, took = replay(
        [steps[n] for n in sorted(steps)], running, settings, step_seconds, fill=fill
    )
    lengths = {int(name.rpartition("_")[2]): n for name, n in counts.items() if name.startswith("row_steps_from_")}
    by_length = {
        f"{n:,} to {2 * n - 1:,}": (counts[f"tokens_from_{n}"] - lengths[n], lengths[n]) for n in sorted(lengths)
    }
    console = console_of_benchmark()
    for title, groups in (("epoch of the prompt", epochs), ("response so far, tokens", by_length)):
        table = Table(box=SIMPLE)
        for heading in (title, "steps of a request", "accepted tokens a step"):
            table.add_column(heading, justify="right")
        for name, (accepted, row_steps) in groups.items():
            table.add_row(str(name), f"{row_steps:,}", f"{accepted / row_steps:.2f}")
        console.print(table)
    for source in SOURCES:
        drafted, accepted = (int(counts.get(f"{name}_{source}", 0)) for name in ("drafted", "accepted"))
        console.print(f"{source}: {accepted:,} of {drafted:,} drafted tokens accepted")
    for rows in sorted({min(took), max(took)}) if took else ():
        each = 1e6 * statistics.median(took[rows]) / rows
        console.print(f"the drafter takes {each:.0f} microseconds a request and step with {rows} running (median)")
    unit = "s" if step_seconds else "engine steps"
    console.print(
        f"without drafts {stock:,.1f} {unit}, with {ours:,.1f}: {stock / ours if ours else 1:.2f} times as fast"
    )


def replay(
    steps: list[list[Response]],
    running: int,
    settings: dict[str, int],
    seconds: Callable[[int], float] | None = None,
    fill: bool = False,
) -> tuple[Counter[str], dict[int, list[int]], float, float, dict[int, list[float]]]:
    """Play the responses of each training step through a :class:`Drafter`, whose history is full already with ``fill``.

    Returns its counts; by epoch, from 1 on, accepted tokens and steps of a request; the seconds without and with drafts, by
    ``seconds`` of running requests, or engine steps where that is None; the seconds of each call of the drafter, by running
    requests.
    """
    length = 2 + max((len(prompt) + len(tokens) for step in steps for prompt, tokens in step), default=0)
    clock = [0.0]
    config = SimpleNamespace(
        additional_config={SETTINGS: settings},
        speculative_config=SimpleNamespace(num_speculative_tokens=settings["max_tokens"]),
        parallel_config=SimpleNamespace(
            distributed_executor_backend="uni", rank=0, tensor_parallel_size=1, prefill_context_parallel_size=1
        ),
    )
    drafter = Drafter(config, lambda: clock[0])
    if fill:
        rng = np.random.default_rng(0)
        others = (rng.integers(0, 2**15, 8192, np.int32) for _ in range(settings["memory_mb"] * 2**20 // (8192 * 9)))
        drafter.absorb(np.array([0, 256], np.int32).tobytes() + tokens.tobytes() for tokens in others)
    took: dict[int, list[float]] = defaultdict(list)
    matrix, none = np.zeros((running, length), np.int32), [[] for _ in range(running)]  # type: ignore[var-annotated]
    seen: Counter[tuple[int, ...]] = Counter()
    epochs: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    spent = {"stock": 0.0, "ours": 0.0}
    for step in steps:
        seen.update({tuple(prompt) for prompt, _ in step})
        for arm in spent:
            waiting = [(prompt, tokens, seen[tuple(prompt)]) for prompt, tokens in reversed(step) if tokens]
            rows: list[list[Any]] = []  # [length of the prompt, tokens, epoch, tokens done, draft]
            while waiting or rows:
                while waiting and len(rows) < running:
                    prompt, tokens, epoch = waiting.pop()
                    matrix[len(rows), : len(prompt)] = prompt
                    rows.append([len(prompt), tokens, epoch, 0, []])
                sampled = []
                for row, (begin, tokens, epoch, done, draft) in enumerate(rows):
                    left = tokens[done : done + len(draft) + 1]
                    equal = [guess == token for guess, token in zip(draft, left[:-1], strict=False)]
                    new = left[: 1 + (equal.index(False) if False in equal else len(equal))]
                    matrix[row, begin + done : begin + done + len(new)] = new
                    rows[row][3] += len(new)
                    sampled.append(new)
                    if arm == "ours":
                        epochs[epoch][0] += len(new) - 1
                        epochs[epoch][1] += 1
                taken = seconds(len(rows)) if seconds else 1.0
                spent[arm] += taken
                clock[0] += taken
                ends = np.array([begin + done for begin, _, _, done, _ in rows])
                drafts = none
                if arm == "ours":
                    began = time.perf_counter()
                    drafts = drafter.propose(sampled, ends, matrix)
                    took[len(rows)].append(time.perf_counter() - began)
                for at, draft in enumerate(drafts[: len(rows)]):
                    rows[at][4] = draft
                for place in reversed([at for at, row in enumerate(rows) if row[3] == len(row[1])]):
                    matrix[place] = matrix[len(rows) - 1]  # as vLLM does it
                    rows[place] = rows[-1]
                    rows.pop()
        drafter.new_weights()
    return drafter.counts, dict(epochs), spent["stock"], spent["ours"], took


def _encoder(folder: str | None) -> Callable[[str], list[int]]:
    if folder is None:
        return lambda text: [ord(character) for character in text]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))
