"""Command ``rl-accel bench drafts``: replays rollout files of a finished run through the drafter, without an inference engine.

The drafter proposes tokens for speculative decoding from earlier responses.
"""

import itertools
import json
import operator
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import click
import numpy as np

from rl_accel.console import show_table, wide_console
from rl_accel.drafts.drafter import SETTINGS, Drafter
from rl_accel.drafts.index import SOURCES
from rl_accel.lab.bench.helpers import number_option

PromptAndResponse = tuple[list[int], list[int]]
"""A prompt and one response to it, both as lists of token ids."""


@click.command("drafts")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, file_okay=False),
    help="Folder of the tokenizer. Default: each character is a token.",
)
@number_option("--running", type=click.IntRange(min=1), default=64, help="Requests that run at once.")
@number_option("--max-tokens", type=click.IntRange(min=1), default=8, help="Longest draft.")
@number_option("--batch-limit", type=click.IntRange(min=1), default=32, help="Requests above which nothing is drafted.")
@click.option("--fill", is_flag=True, help="First fill the history with random responses to other prompts.")
def bench_drafts(
    files: tuple[Path, ...], tokenizer: str | None, running: int, max_tokens: int, batch_limit: int, fill: bool
) -> None:
    """Replay FILES that verl wrote to trainer.rollout_data_dir through the drafter, which proposes tokens for speculative decoding.

    The responses of a training step run on one replica. At most --running responses run at once, and the next response starts when
    one has ended. The text of the files is tokenized again. The replay makes two assumptions. An engine step takes as long with
    drafts as without drafts, and prefill takes no time.
    """
    encode = _encoder(tokenizer)
    steps: dict[int, list[PromptAndResponse]] = defaultdict(list)
    for path in files:
        for line in filter(str.strip, path.read_text(encoding="utf-8").split("\n")):
            try:
                row = json.loads(line)
                steps[int(row["step"])].append((encode(row["input"]), encode(row["output"])))
            except (ValueError, KeyError, TypeError) as error:
                raise click.ClickException(f"{path}: wanted lines with input, output and step: {error!r}") from error
    settings = {"max_tokens": max_tokens, "batch_limit": batch_limit}
    result = replay([steps[n] for n in sorted(steps)], running, settings, fill)
    counts, seconds = result.counts, result.seconds
    lengths = {int(name.rpartition("_")[2]): n for name, n in counts.items() if name.startswith("row_steps_from_")}
    by_length = {
        f"{n:,} to {2 * n - 1:,}": (counts[f"tokens_from_{n}"] - lengths[n], lengths[n]) for n in sorted(lengths)
    }
    console = wide_console()
    for title, groups in (("epoch of the prompt", result.epochs), ("response so far, tokens", by_length)):
        cells = [(name, f"{count:,}", f"{accepted / count:.2f}") for name, (accepted, count) in groups.items()]
        show_table(console, (title, "steps of a request", "accepted tokens a step"), cells)
    for source in SOURCES:
        drafted, accepted = (int(counts.get(f"{name}_{source}", 0)) for name in ("drafted", "accepted"))
        console.print(f"{source}: {accepted:,} of {drafted:,} drafted tokens accepted")
    for rows in sorted({min(seconds), max(seconds)}) if seconds else ():
        each = 1e6 * statistics.median(seconds[rows]) / rows
        console.print(f"the drafter takes {each:.0f} microseconds a request and step with {rows} running (median)")
    stock, drafted_steps = result.engine_steps[False], result.engine_steps[True]
    speedup = stock / drafted_steps if drafted_steps else 1
    console.print(f"without drafts {stock:,} engine steps, with {drafted_steps:,}: {speedup:.2f} times as fast")


@dataclass
class _Row:
    prompt: list[int]
    tokens: list[int]
    epoch: int
    done: int = 0
    draft: list[int] = field(default_factory=list)

    def step(self) -> list[int]:
        """Advances the request by one engine step. Returns the new tokens: the accepted tokens of the draft and one more."""
        upcoming = self.tokens[self.done : self.done + len(self.draft) + 1]
        new = upcoming[: 1 + sum(itertools.takewhile(bool, map(operator.eq, self.draft, upcoming[:-1])))]
        self.done += len(new)
        return new


@dataclass
class Replay:
    """Result of :func:`replay`.

    Attributes:
        engine_steps: number of engine steps without drafts (key False) and with drafts (key True).
        epochs: mapping from epoch to [accepted draft tokens, engine steps], both summed over requests. A prompt's first training
            step is its epoch 1, the next training step with this prompt is its epoch 2, and so on.
        seconds: seconds of each call of the drafter, by number of running requests.
        counts: counters of the drafter, by name.
    """

    engine_steps: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    epochs: dict[int, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    seconds: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    counts: Mapping[str, float] = field(default_factory=dict)


def replay(steps: list[list[PromptAndResponse]], running: int, settings: dict[str, int], fill: bool = False) -> Replay:
    """Replays the responses of each training step twice: without drafts, and with drafts of a :class:`Drafter`.

    At most ``running`` requests run at once. If ``fill``, the drafter's history of responses is filled with random ones first.
    """
    result = Replay()
    drafter = _drafter(settings, fill, lambda: sum(result.engine_steps.values()))
    longest = 2 + max((len(prompt) + len(tokens) for step in steps for prompt, tokens in step), default=0)
    matrix = np.zeros((running, longest), np.int32)
    seen: Counter[tuple[int, ...]] = Counter()
    for step in steps:
        seen.update({tuple(prompt) for prompt, _ in step})
        for drafts in (False, True):
            waiting = [_Row(prompt, tokens, seen[tuple(prompt)]) for prompt, tokens in reversed(step) if tokens]
            _replay_responses(waiting, matrix, drafter if drafts else None, result)
        drafter.new_weights()
    result.counts = drafter.take_counts()
    return result


def _drafter(settings: dict[str, int], fill: bool, engine_steps: Callable[[], int]) -> Drafter:
    # what vLLM would pass: one engine process on one device
    parallel = {"distributed_executor_backend": "uni", "rank": 0}
    parallel |= {"tensor_parallel_size": 1, "prefill_context_parallel_size": 1}
    config = SimpleNamespace(
        additional_config={SETTINGS: settings},
        speculative_config=SimpleNamespace(num_speculative_tokens=settings["max_tokens"]),
        parallel_config=SimpleNamespace(**parallel),
    )
    drafter = Drafter(config, engine_steps)
    if fill:
        rng = np.random.default_rng(0)
        count = drafter.settings.memory_mb * 2**20 // (8192 * 9)  # more than fit: a token takes 12 bytes
        others = (rng.integers(0, 2**15, 8192, np.int32) for _ in range(count))
        drafter.absorb(np.array([0, 256], np.int32).tobytes() + tokens.tobytes() for tokens in others)
    return drafter


def _replay_responses(waiting: list[_Row], matrix: np.ndarray, drafter: Drafter | None, result: Replay) -> None:
    """Replays the responses in ``waiting``, from the last to the first, and adds the measurements to ``result``.

    ``matrix`` holds the tokens of each running request in a row, as vLLM passes them to a drafter. If ``drafter`` is None, nothing
    is drafted.
    """
    rows: list[_Row] = []
    while waiting or rows:
        while waiting and len(rows) < len(matrix):
            row = waiting.pop()
            matrix[len(rows), : len(row.prompt + row.tokens)] = row.prompt + row.tokens
            rows.append(row)
        sampled = [row.step() for row in rows]
        result.engine_steps[drafter is not None] += 1
        if drafter is not None:
            began = time.perf_counter()
            drafts = drafter.propose(sampled, np.array([len(row.prompt) + row.done for row in rows]), matrix)
            result.seconds[len(rows)].append(time.perf_counter() - began)
            for row, new, row.draft in zip(rows, sampled, drafts, strict=True):
                result.epochs[row.epoch][0] += len(new) - 1
                result.epochs[row.epoch][1] += 1
        for gap in reversed([i for i, row in enumerate(rows) if row.done == len(row.tokens)]):
            matrix[gap] = matrix[len(rows) - 1]  # vLLM fills gaps in the same way
            rows[gap] = rows[-1]
            rows.pop()


def _encoder(folder: str | None) -> Callable[[str], list[int]]:
    if folder is None:
        return lambda text: [ord(character) for character in text]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))
