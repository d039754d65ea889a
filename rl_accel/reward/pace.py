"""By how much this machine is slower at the moment than it has been at its best."""

import statistics
import time
from collections import deque

_EVERY_SECONDS = 1.0
_KEPT = 5
_MOST = 10.0


class Pace:
    """Times a fixed piece of work of about a millisecond, at most once a second.

    It is timed in processor seconds: what a busy neighbour costs through shared caches, a shared core or a lower frequency. What a
    program waits for a processor is measured on the program itself, see :class:`~rl_accel.reward.program.CaseResult`.
    """

    def __init__(self) -> None:
        self._best = min(_work() for _ in range(20))
        self._recent: deque[float] = deque([self._best], maxlen=_KEPT)
        self._measured = time.monotonic()

    def slowdown(self) -> float:
        """Return the recent time of the work over the best one ever seen, between 1 and 10."""
        now = time.monotonic()
        if now - self._measured >= _EVERY_SECONDS:
            self._measured = now
            seconds = _work()
            self._best = min(self._best, seconds)
            self._recent.append(seconds)
        return min(max(statistics.median(self._recent) / self._best, 1.0), _MOST)


def _work() -> float:
    began = time.thread_time()
    amount = 0
    for i in range(20_000):
        amount += i * i
    return time.thread_time() - began
