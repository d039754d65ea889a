"""Graders that await something, such as a reward server: within a limit, on slime's own event loop."""

import asyncio
import contextlib
import logging
import time
import types
from collections.abc import Coroutine, Generator, Iterator
from typing import Any

from rl_accel.reward.program import GradeResult, Limits

logger = logging.getLogger("rl_accel")

HELD_SECONDS = 1.0
"""A grader that goes on for so long without awaiting anything is reported: nothing else happens on the event loop meanwhile."""
_left_behind: set["asyncio.Task[Any]"] = set()
_warned: set[str] = set()


class _Steps:
    """Runs a coroutine and times what it does between two awaits. The processor time of the event loop in it is its own."""

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
                wanted = self._coroutine.send(value) if error is None else self._coroutine.throw(error)
            except StopIteration as end:
                return end.value
            except SystemExit as exit_:  # it would end the thread of the event loop
                raise RuntimeError(f"SystemExit: {exit_.code}") from exit_
            finally:
                self.longest = max(self.longest, time.monotonic() - wall)
                self.cpu += time.thread_time() - cpu
            value, error = None, None
            try:
                value = yield wanted
            except BaseException as thrown:
                error = thrown


@contextlib.contextmanager
def _alarm(limits: Limits) -> Iterator["asyncio.Future[None]"]:
    """A future that is done when the time is up, also if the limit changes meanwhile."""
    loop = asyncio.get_running_loop()
    began, over = loop.time(), loop.create_future()

    def ring() -> None:
        if not over.done():
            over.set_result(None)

    def move(wall: float, _cpu: float) -> None:
        nonlocal timer
        timer.cancel()
        timer = loop.call_at(began + wall, ring)

    timer = loop.call_at(began + limits.wall, ring)
    try:
        with limits.updates.subscribed(move) if limits.updates else contextlib.nullcontext():
            yield over
    finally:
        timer.cancel()
        over.cancel()


async def within(coroutine: Coroutine[Any, Any, Any], limits: Limits, name: str) -> GradeResult:
    """Await ``coroutine`` for at most ``limits.wall`` seconds. One that does not let itself be cancelled is left behind."""
    steps = _Steps(coroutine)
    began = time.monotonic()
    task = asyncio.ensure_future(steps.run())
    _left_behind.add(task)
    task.add_done_callback(_left_behind.discard)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        with _alarm(limits) as over:
            await asyncio.wait({task, over}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
        if steps.longest > HELD_SECONDS and name not in _warned:
            _warned.add(name)
            logger.warning(
                "rl-accel: %s held slime's event loop for %.1f s, while no response could go on; as a plain function (no"
                " async) it would run in a process of its own, which can be stopped",
                name,
                steps.longest,
            )
    wall = time.monotonic() - began
    if not task.done():
        return GradeResult(None, "timeout", wall, steps.cpu, 0.0, "wall limit")
    if task.cancelled():
        return GradeResult(None, "error", wall, steps.cpu, 0.0, "it was cancelled, and not by us")
    error = task.exception()
    if error is not None:
        return GradeResult(None, "error", wall, steps.cpu, 0.0, f"{type(error).__name__}: {error}"[:500])
    return GradeResult(task.result(), "done", wall, steps.cpu, 0.0, "")
