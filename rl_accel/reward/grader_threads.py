"""Threads of coroutine graders (``asyncio.to_thread``, ``run_in_executor``) that outlive a stopped execution."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

_CALLS: ContextVar[list[Future[Any]] | None] = ContextVar("rl_accel_grader_threads", default=None)
"""Calls that the current execution has given to threads."""


class GraderThreads(ThreadPoolExecutor):
    """An event loop's default executor that replaces threads which hang.

    A thread cannot be stopped. In the pool that asyncio makes, a few hung threads leave none for later calls. Here each call
    that still runs when its execution is stopped gets a substitute thread until the call returns.
    """

    def __init__(self) -> None:
        super().__init__(thread_name_prefix="rl_accel_grader")  # as many threads as asyncio's own

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        call = super().submit(function, *args, **kwargs)
        if (calls := _CALLS.get()) is not None:
            calls.append(call)
        return call

    def replace(self, calls: list[Future[Any]]) -> None:
        """Adds a thread for each of ``calls`` that is running. Calls that have not begun are cancelled."""
        for call in calls:
            if not call.cancel() and not call.done():
                self._max_workers += 1
                call.add_done_callback(self._end_substitute)
                self._adjust_thread_count()

    def _end_substitute(self, _: Future[Any]) -> None:
        self._max_workers -= 1


@contextlib.contextmanager
def threads_of_execution(loop: asyncio.AbstractEventLoop) -> Iterator[Callable[[], None]]:
    """Within the block, tasks that are created belong to one execution. What is yielded gives up its threads that run.

    The first block on a ``loop`` sets its default executor, unless the program has set one of its own.
    """
    current = getattr(loop, "_default_executor", None)
    if current is None or getattr(current, "_thread_name_prefix", "") == "asyncio":
        current = GraderThreads()
        loop.set_default_executor(current)
    calls: list[Future[Any]] = []
    before = _CALLS.set(calls)
    try:
        yield lambda: current.replace(calls) if isinstance(current, GraderThreads) else None
    finally:
        _CALLS.reset(before)
