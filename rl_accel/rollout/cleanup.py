"""Lets cancelled code of a response clean up in the background, so that neither the round nor the next round waits for it.

An agent loop may hold a remote sandbox or a browser, which its ``finally:`` closes. A second cancellation would cut that off.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from rl_accel.errors import typed_line

logger = logging.getLogger("rl_accel")
T = TypeVar("T")

GRACE_SECONDS = 0.5
"""Seconds that a round waits for cancelled code without requests, which nearly always ends within milliseconds. At 1.0 a round with
one slow clean-up ends half a second later; at 0.25 a busy process leaves code in the background that has nothing to clean up."""


@dataclass(eq=False, kw_only=True)
class Interruptible:
    """State of a response that can be ended from within its agent loop, between two requests.

    Attributes:
        task: asyncio task that runs the response.
        limit: asyncio timeout of the agent loop; None before the agent loop begins.
        interrupted: True once :meth:`interrupt` was called.
    """

    task: "asyncio.Task[None]" = field(init=False)
    limit: asyncio.Timeout | None = None
    interrupted: bool = False

    def is_over_limit(self) -> bool:
        """Returns True if the time limit of the agent loop has passed."""
        return self.limit is not None and self.limit.expired()

    def is_interrupted(self) -> bool:
        """Returns True once :meth:`interrupt` was called."""
        return self.interrupted

    def interrupt(self) -> NoReturn:
        """Raises asyncio.CancelledError in the agent loop that calls this method, and cancels the task of the response."""
        self.interrupted = True
        self.task.cancel()
        raise asyncio.CancelledError


class CancellableCode:
    """Runs code of responses, such as agent loops. A cancellation reaches it once; it may then clean up in the background.

    Args:
        limit: seconds after which clean-up in the background is cut off; None: never.
    """

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._in_background: set[asyncio.Task[Any]] = set()

    async def run(
        self,
        code: Coroutine[Any, Any, T],
        is_busy: Callable[[], bool],
        has_been_told: Callable[[], bool] = lambda: False,
    ) -> T:
        """Runs ``code`` in another task and returns its result.

        If the caller is cancelled, cancels ``code`` and waits until it has ended. Code that goes on without a request under way is
        left in the background.

        Args:
            code: coroutine of a response.
            is_busy: function that returns True while a request of ``code`` is under way, which must end first. No request may begin
                once ``code`` is cancelled.
            has_been_told: function that returns True if ``code`` has already received a CancelledError by another way.

        Raises:
            asyncio.CancelledError: the caller was cancelled.
        """
        work = asyncio.create_task(code)
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            if not has_been_told():
                work.cancel()
            try:
                await self._end_of(work, is_busy)
            finally:
                self._leave(work)
            raise
        return work.result()

    async def wait(self) -> None:
        """Waits for all clean-up in the background."""
        if self._in_background:
            await asyncio.wait(self._in_background)

    async def _end_of(self, work: "asyncio.Task[Any]", is_busy: Callable[[], bool]) -> None:
        """Returns when ``work`` has ended, or when it has had no request for :data:`GRACE_SECONDS`."""
        was_busy = True
        while not work.done() and (was_busy or is_busy()):
            was_busy = is_busy()
            await asyncio.wait({work}, timeout=GRACE_SECONDS)

    def _leave(self, work: "asyncio.Task[Any]") -> None:
        if work.done():
            if not work.cancelled():
                work.exception()  # otherwise asyncio would complain that nobody has asked for it
            return
        self._in_background.add(work)
        cut_off = None
        if self._limit is not None:
            cut_off = asyncio.get_running_loop().call_later(self._limit, self._cut_off, work)
        work.add_done_callback(functools.partial(self._note_end, cut_off))

    def _cut_off(self, work: "asyncio.Task[Any]") -> None:
        logger.warning("rl-accel: clean-up of a cancelled response is cut off after %g s (cleanup_limit)", self._limit)
        work.cancel()

    def _note_end(self, cut_off: asyncio.TimerHandle | None, work: "asyncio.Task[Any]") -> None:
        self._in_background.discard(work)
        if cut_off is not None:
            cut_off.cancel()
        if not work.cancelled() and (error := work.exception()) is not None:
            logger.warning("rl-accel: clean-up of a cancelled response has failed: %s", typed_line(error))


@contextlib.asynccontextmanager
async def agent_loop_limit(seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Cancels the code in the ``async with`` block after ``seconds``; None: never. Yields the timeout, which can be rescheduled.

    Raises:
        TimeoutError: the block was cancelled. The message names the flag ``agent_loop_limit``.
    """
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield limit
    except TimeoutError as error:
        if limit.expired():
            raise TimeoutError(f"its agent loop was not over after {seconds} s (agent_loop_limit)") from error
        raise
