"""Threads that run kernels which release the interpreter lock.

numba's own parallel layer is not used: its default backend ends the process when two Python threads enter it at once, and
its OpenMP one when the process has forked. Both happen inside a Ray actor.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

MOST_THREADS = 16


class Workers:
    """A thread pool that is made on first use, and again in a forked child, where a parent's threads do not exist."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Run ``tasks``, the first in the calling thread; return when all are done; raise the first error."""
        others = [self._get().submit(task) for task in tasks[1:]]
        try:
            if tasks:
                tasks[0]()
        finally:
            # the tasks write into memory that the caller owns, so none may outlive this call
            for other in others:
                other.exception()
        for other in others:
            other.result()

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
