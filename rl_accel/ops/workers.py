"""Threads that run kernels which release the interpreter lock.

numba's own parallel layer is not used: its default backend ends the process when two Python threads enter it at once, and
its OpenMP one when the process has forked. Both happen inside a Ray actor.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

MOST_THREADS = 16


class Workers:
    """A thread pool that is made on first use, and again in a forked child, where a parent's threads do not exist."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def run(self, tasks: Iterable[Callable[[], None]], threads: int | None = None) -> None:
        """Run ``tasks`` on ``threads`` threads, this one among them; return when all are done; raise the first error."""
        waiting = deque(tasks)
        threads = default_threads() if threads is None else threads

        def work() -> None:
            # taken one by one, so that a thread that the system holds up holds up nobody else
            while waiting:
                try:
                    task = waiting.popleft()
                except IndexError:
                    return
                task()

        others = [self._get().submit(work) for _ in range(min(threads, len(waiting)) - 1)]
        try:
            work()
        finally:
            # tasks write into memory that the caller owns, so none may outlive this call
            errors = [other.exception() for other in others]
        for error in errors:
            if error is not None:
                raise error

    def _get(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(usable_cores(), thread_name_prefix="rl_accel")
            return self._pool

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._pool = None


def usable_cores() -> int:
    """Cores this process may run on. Ray sets OMP_NUM_THREADS=1 in its actors, so torch's thread count says nothing."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads() -> int:
    """Threads a kernel uses unless told: the usable cores, at most 16, where memory bandwidth is long used up."""
    return min(usable_cores(), MOST_THREADS)


WORKERS = Workers()
