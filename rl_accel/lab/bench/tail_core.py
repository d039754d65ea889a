"""How many events a second the core of tail batching takes, alone: no framework, no clock, responses by a drawn schedule."""

import gc
import heapq
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rl_accel.rollout.tail_batching import TailBatching
from rl_accel.rollout.tail_decisions import Cancel, Decision, Finished, Launch, RequestPrompts, RoundEnded, TrainBatch
from rl_accel.rollout.tail_settings import TailSettings

JUDGE_S, ABORT_S = 0.3, 0.1
"""Seconds until a response is scored after it was generated, and until a cancelled one is acknowledged."""

Call = tuple[str, tuple[Any, ...]]


class WrongResult(AssertionError):
    """The check that comes before any number failed; says what was wanted and what was found."""


@dataclass(frozen=True)
class CoreSpeed:
    """What one size gave. ``events`` are calls into the core; ``kinds`` counts rounds of each kind; ``seconds``
    are of processor time."""

    prompts: int
    responses: int
    prompt_ratio: str
    rounds: int
    kinds: dict[str, int]
    events: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and ``events_per_s``, ready for JSON."""
        return {**asdict(self), "events_per_s": self.events / self.seconds}


def measure(settings: TailSettings, rounds: int, repeats: int = 3, seed: int = 0) -> CoreSpeed:
    """Play ``rounds`` batches of data to their end, check the result, then time the same calls on a fresh core.

    The core has no clock, so that the calls of one run can be written down and played back without the schedule between them.

    Args:
        settings: P0, R0 and ratios.
        rounds: batches of data.
        repeats: how often the calls are played back; the fastest counts.
        seed: of the drawn times.

    Raises:
        WrongResult: a batch was not P0 x R0, or a prompt was not trained exactly once.
    """
    calls, batches = record(settings, rounds, seed)
    check(batches, settings, rounds)
    best = float("inf")
    for _ in range(repeats):
        core = TailBatching(settings)
        bound: list[tuple[Callable[..., list[Decision]], tuple[Any, ...]]] = [(getattr(core, n), a) for n, a in calls]
        gc.collect()
        started = time.process_time()  # others may use the machine meanwhile
        for method, arguments in bound:
            method(*arguments)
        best = min(best, time.process_time() - started)
        if core.unsettled_prompts():
            raise WrongResult("the same calls must lead to the same end, found prompts that are not settled")
    kinds = {kind: sum(batch.kind == kind for batch in batches) for kind in ("short", "long", "final")}
    return CoreSpeed(
        settings.prompts_per_step,
        settings.responses_per_prompt,
        str(settings.prompt_ratio),
        len(batches),
        kinds,
        len(calls),
        best,
    )


def record(settings: TailSettings, rounds: int, seed: int = 0) -> tuple[list[Call], list[TrainBatch]]:
    """Drive a core through ``rounds`` batches of data; return the calls made and the batches that came out."""
    core, rng = TailBatching(settings), random.Random(seed)
    rows = rounds * settings.prompts_per_step
    calls: list[Call] = []
    batches: list[TrainBatch] = []
    due: list[tuple[float, int, str, int, int]] = []
    cancelled: set[int] = set()
    difficulty: dict[str, float] = {}
    now, offered, serial, finished = 0.0, 0, 0, False

    def call(name: str, *arguments: Any) -> list[Decision]:
        calls.append((name, arguments))
        found: list[Decision] = getattr(core, name)(*arguments)
        return found

    while not finished:
        todo, ended = call("begin_round", now), False
        while not ended:
            for decision in todo if isinstance(todo, list) else ():
                match decision:
                    case Launch():
                        hard = difficulty.setdefault(decision.prompt_id, rng.gauss(0, 0.7))
                        for response_id in decision.response_ids:
                            after = rng.lognormvariate(hard, 0.7)
                            serial += 1
                            heapq.heappush(due, (now + after, serial, "generated", response_id, int(100 * after)))
                    case Cancel():
                        cancelled.update(decision.response_ids)
                        for response_id in decision.response_ids:
                            serial += 1
                            heapq.heappush(due, (now + ABORT_S, serial, "aborted", response_id, 50))
                    case TrainBatch():
                        batches.append(decision)
                    case RoundEnded():
                        ended = True
                    case Finished():
                        ended = finished = True
                    case RequestPrompts():
                        pass
            if ended:
                break
            wanted = next((sum(d.counts.values()) for d in todo if isinstance(d, RequestPrompts)), 0)
            if wanted:
                new = [f"1:{row + 1}" for row in range(offered, min(offered + wanted, rows))]
                offered += len(new)
                todo = call("offer", new, now) if new else call("data_exhausted", now)
                continue
            now, _, what, response_id, tokens = heapq.heappop(due)
            todo = []
            if what == "aborted":
                todo = call("response_aborted", response_id, tokens, now)
            elif response_id in cancelled:
                continue
            elif what == "generated":
                serial += 1
                heapq.heappush(due, (now + JUDGE_S * rng.random(), serial, "scored", response_id, tokens))
                todo = call("response_generated", response_id, tokens, now)
            else:
                todo = call("response_scored", response_id, now)
    return calls, batches


def check(batches: list[TrainBatch], settings: TailSettings, rounds: int) -> None:
    """Every batch has P0 groups of R0, every prompt of ``rounds`` batches of data was trained once, no response twice.

    Raises:
        WrongResult: it is not so.
    """
    wanted, each = settings.prompts_per_step, settings.responses_per_prompt
    for batch in batches:
        sizes = {len(group.response_ids) for group in batch.groups}
        if len(batch.groups) != wanted or sizes != {each}:
            raise WrongResult(f"a batch must have {wanted} x {each} responses, found {len(batch.groups)} x {sizes}")
    trained = [group.prompt_id for batch in batches for group in batch.groups]
    if len(trained) != len(set(trained)) or len(trained) != rounds * wanted:
        raise WrongResult(
            f"{rounds * wanted} prompts must be trained once each, found {len(trained)}, {len(set(trained))} of them distinct"
        )
    responses = [i for batch in batches for group in batch.groups for i in group.response_ids]
    if len(responses) != len(set(responses)):
        raise WrongResult("a response must be trained once, found one twice")
