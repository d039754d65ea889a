"""Awaits coroutines: one within a time limit that may move, or several of which one may end the others."""

import asyncio
import logging
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from typing import Any, TypeVar

from rl_accel.reward.execution import ExecutionResult, Limits, Verdict

logger = logging.getLogger("rl_accel")
T = TypeVar("T")

HELD_SECONDS = 1.0
"""A grader that runs for so long without awaiting anything is reported: nothing else happens on the event loop meanwhile."""
_running: set["asyncio.Task[Any]"] = set()
"""Tasks that have not ended, those that ignore their cancellation among them. asyncio itself holds tasks weakly."""
_reported: set[str] = set()


async def run_within(coroutine: Coroutine[Any, Any, Any], limits: Limits, name: str) -> ExecutionResult:
    """Await ``coroutine`` for at most ``limits.wall`` seconds, or what ``limits.updates`` says meanwhile.

    At the limit it is cancelled, and so it is if this call is cancelled. One that ignores its cancellation is no longer waited for.

    Args:
        coroutine: a coroutine, not yet awaited.
        limits: ``cpu`` and the others are not enforced.
        name: of the grader, for the warning if it holds the event loop.

    Returns:
        A result whose ``cpu`` is what the event loop's thread used for this coroutine.
    """
    steps = _TimedSteps(coroutine)
    loop = asyncio.get_running_loop()
    began = loop.time()
    task = asyncio.ensure_future(steps.run())
    _running.add(task)
    task.add_done_callback(_forget)
    deadline = asyncio.timeout(limits.wall)

    def move(wall: float, _cpu: float) -> None:
        if not deadline.expired():
            deadline.reschedule(began + wall)

    try:
        async with deadline:
            with limits.updates.subscribed(move):
                await asyncio.wait({task})  # raises nothing of the grader's: a TimeoutError is ours
    except TimeoutError:
        pass
    finally:
        if not task.done():
            task.cancel()
        if steps.longest > HELD_SECONDS and name not in _reported:
            _reported.add(name)
            logger.warning(
                "rl-accel: %s held the event loop for %.1f s, while no response could go on; as a plain function (no async) it"
                " would run in a process of its own, which can be stopped",
                name,
                steps.longest,
            )
    verdict: Verdict = "error"
    value, reason = None, ""
    if not task.done():
        verdict, reason = "timeout", "wall limit"
    elif task.cancelled():
        reason = "it was cancelled, and not by us"
    elif error := task.exception():
        reason = f"{type(error).__name__}: {error}"[:500]
    else:
        verdict, value = "done", task.result()
    return ExecutionResult(verdict, value, loop.time() - began, steps.cpu, reason=reason)


async def gather_until(awaitables: Iterable[Awaitable[T]], ends: Callable[[T], bool] = lambda _: False) -> list[T]:
    """Await all at once and return their results in order; once one raises, or ``ends`` is true of a result, cancel the others.

    The results of those that were cancelled are missing in the list.
    """
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        for next_done in asyncio.as_completed(tasks):
            if ends(await next_done):
                break
        return [task.result() for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()


class _TimedSteps:
    """Runs a coroutine and times each step from one await to the next.

    Attributes:
        longest: wall seconds of the longest step.
        cpu: processor seconds of all steps.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self.longest = 0.0
        self.cpu = 0.0

    @types.coroutine
    def run(self) -> Generator[Any, Any, Any]:
        value, error = None, None
        while True:
            wall, cpu = time.monotonic(), time.thread_time()
            try:
                awaited = self._coroutine.send(value) if error is None else self._coroutine.throw(error)
            except StopIteration as end:
                return end.value
            except SystemExit as exit_:  # it would end the thread of the event loop
                raise RuntimeError(f"SystemExit: {exit_.code}") from exit_
            finally:
                self.longest = max(self.longest, time.monotonic() - wall)
                self.cpu += time.thread_time() - cpu
            value, error = None, None
            try:
                value = yield awaited
            except BaseException as thrown:
                error = thrown


def _forget(task: "asyncio.Task[Any]") -> None:
    _running.discard(task)
    if not task.cancelled():
        task.exception()  # retrieved, or asyncio would log it
