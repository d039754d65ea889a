"""Thread pool for calls of coroutine graders (``asyncio.to_thread``, ``run_in_executor``) that outlive a stopped execution."""

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

_CALLS: ContextVar[list[Future[Any]] | None] = ContextVar("rl_accel_grader_threads", default=None)
"""Calls that the current execution of a grader has submitted to the thread pool; None in code that belongs to no execution."""
_OURS: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, GraderThreads]" = weakref.WeakKeyDictionary()
"""Thread pool that this module has made, by event loop. Kept here because loops of uvloop, which Ray's actors use, do not show
their executor."""


class GraderThreads(ThreadPoolExecutor):
    """Thread pool that replaces a thread if its call still runs when the execution that made the call is stopped.

    The pool begins with as many threads as asyncio's own pool. A thread cannot be stopped. Without further threads, a few hung
    calls would leave no thread for later calls. When a hung call returns, the pool shrinks again.
    """

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        call = super().submit(function, *args, **kwargs)
        if (calls := _CALLS.get()) is not None:
            calls.append(call)
        return call

    def replace(self, calls: list[Future[Any]]) -> None:
        """Adds a thread to the pool for each call in ``calls`` that is running. Cancels the calls that have not begun."""
        for call in calls:
            if not call.cancel() and not call.done():
                self._max_workers += 1
                call.add_done_callback(self._end_substitute)
                self._adjust_thread_count()

    def _end_substitute(self, _: Future[Any]) -> None:
        self._max_workers -= 1


@contextlib.contextmanager
def threads_of_execution(loop: asyncio.AbstractEventLoop) -> Iterator[Callable[[], None]]:
    """Context manager that assigns all asyncio tasks created within the block, and their calls in threads, to one execution.

    Yields a function to call when the execution is stopped. It adds threads in place of those in which calls of the execution
    still run (:meth:`GraderThreads.replace`).

    Makes a :class:`GraderThreads` the default executor of ``loop``. If the program has set another default executor, that executor
    stays, and the yielded function does nothing.
    """
    current = getattr(loop, "_default_executor", _OURS.get(loop))
    if current is None or getattr(current, "_thread_name_prefix", "") == "asyncio":
        current = _OURS[loop] = GraderThreads(thread_name_prefix="rl_accel_grader")
        loop.set_default_executor(current)
    calls: list[Future[Any]] = []
    before = _CALLS.set(calls)
    try:
        yield lambda: current.replace(calls) if isinstance(current, GraderThreads) else None
    finally:
        _CALLS.reset(before)
