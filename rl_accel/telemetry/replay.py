"""What tail batching would have made of a run's own completion times, by playing rounds with them again."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from rl_accel.telemetry.responses import COMPLETED, Response

ROUNDS = 2000


@dataclass(frozen=True)
class Replay:
    """Mean seconds of a rollout of ``prompts`` prompts, as it is and in rounds that launch ``launched``.

    ``known`` is how many prompts' times were drawn from.
    """

    as_it_is: float
    in_rounds: float
    prompts: int
    launched: int
    known: int

    @property
    def saved(self) -> float:
        return max(self.as_it_is - self.in_rounds, 0.0)


def prompt_seconds(responses: Sequence[Response]) -> list[float] | None:
    """Return, for each prompt of a step, the seconds from the step's first response until all of its own had their reward.

    None if a response was cancelled or failed: the time that it would have taken is unknown.
    """
    if not responses or any(response.outcome != COMPLETED for response in responses):
        return None
    start = min(response.began for response in responses)
    last: dict[str, float] = {}
    for response in responses:
        done = (response.ended if response.rewarded is None else response.rewarded) - start
        last[response.prompt] = max(last.get(response.prompt, 0.0), done)
    return list(last.values())


def replay(steps: Sequence[Sequence[float]], ratio: float = 1.25, rounds: int = ROUNDS, seed: int = 0) -> Replay | None:
    """Play ``rounds`` rounds of tail batching with the times of ``steps``; None if there is no prompt.

    A short round draws ``ceil(ratio * P0)`` prompts, lasts until P0 of them are complete and puts the others into a queue; a queue
    of P0 makes a long round, which waits for all of them. Either trains P0 prompts. A prompt that was put off takes in a long round
    what it took before: long by nature. What is left out: prompts that were long by chance, a surplus of responses (both would save
    more), and that generation is slower with more prompts at once (which saves less).

    Args:
        steps: completion times of the prompts of each step; P0 is how many the largest has.
        ratio: prompts launched in a short round over those trained.
        rounds: how many to play.
        seed: of the draws.
    """
    times = np.array([seconds for step in steps for seconds in step])
    if not len(times):
        return None
    prompts = max(len(step) for step in steps)
    launched = ceil(ratio * prompts - 1e-9)
    chance = np.random.default_rng(seed)
    queue: deque[float] = deque()
    spent = 0.0
    for _ in range(rounds):
        if len(queue) >= prompts:
            spent += max(queue.popleft() for _ in range(prompts))
            continue
        drawn = np.sort(chance.choice(times, launched))
        spent += float(drawn[prompts - 1])
        queue.extend(drawn[prompts:].tolist())
    return Replay(float(np.mean([max(step) for step in steps if step])), spent / rounds, prompts, launched, len(times))
