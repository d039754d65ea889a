"""What stands in for a model under load: a rollout server that sleeps, and agent-loop workers that note when things happen."""

import asyncio
import hashlib
import math
import os
import random
import resource
import time
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput

from rl_accel.integrations.verl.tail_batching.agent_loop import TailAgentLoopManager, TailAgentLoopWorker

LONGEST = 8.0
"""The limit on a drawn time, in medians; a model's limit on the length of a response does the same."""


def drawn(prompt: bytes, rng: random.Random) -> float:
    """Return a time in medians: log-normal with a deviation of 1, half of the variance shared by all responses of ``prompt``."""
    shared = random.Random(hashlib.sha256(prompt).digest()).gauss(0, math.sqrt(0.5))
    return min(math.exp(shared + rng.gauss(0, math.sqrt(0.5))), LONGEST)


def memory_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def processor_seconds() -> float:
    """Return the processor time of this process so far, all threads, user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class SleepingServer:
    """A rollout server that sleeps a drawn time in place of decoding. A cancelled caller ends the sleep, as in vLLM.

    Args:
        median_s: the median of the drawn times.
        tokens: tokens of a response that takes the median; others have as many more or fewer.
        seed: of the drawn times.
    """

    def __init__(self, median_s: float, tokens: int, seed: int) -> None:
        self._median_s, self._tokens, self._rng = median_s, tokens, random.Random(seed)
        self._running = 0
        self._aborted = asyncio.Event()

    async def generate(self, request_id: str, prompt_ids: list[int], **_: Any) -> TokenOutput:
        length = drawn(repr(prompt_ids).encode(), self._rng)
        self._running += 1
        began, reason = time.monotonic(), "completed"
        try:
            await asyncio.wait_for(self._aborted.wait(), length * self._median_s)
            length, reason = min(length, (time.monotonic() - began) / self._median_s), "aborted"
        except TimeoutError:
            pass
        finally:
            self._running -= 1
        ids = [3 + i % 32 for i in range(max(1, round(length * self._tokens)))]
        return TokenOutput(token_ids=ids, stop_reason=reason, num_preempted=0, extra_fields={"global_steps": 0})

    async def abort_all_requests(self) -> None:
        """End every request, and later ones as soon as they come, until :meth:`resume_generation`."""
        self._aborted.set()

    async def resume_generation(self) -> None:
        self._aborted.clear()

    async def running(self) -> int:
        """Return the number of requests that are not over."""
        return self._running


class NotingWorker(TailAgentLoopWorker):
    """Our agent-loop worker; it also notes when it reported what, on the clock that all processes of a machine share."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._notes: list[tuple[str, int, float]] = []

    def _report(self, event: Any) -> None:
        self._notes.append((event.kind, event.response_id, time.monotonic()))
        super()._report(event)

    async def notes(self) -> list[tuple[str, int, float]]:
        """Return ``(kind, response id, time)`` of the events since the last call."""
        notes, self._notes = self._notes, []
        return notes

    async def usage(self) -> tuple[int, float]:
        """Return resident bytes and processor seconds of this process."""
        return memory_bytes(), processor_seconds()


class NotingManager(TailAgentLoopManager):
    """Our agent-loop manager over workers that note."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(NotingWorker)
