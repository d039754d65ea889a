"""Runs a reward function within the limits of the policy: sync ones in processes that can be killed, async ones here."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rl_accel.integrations.verl.reward_timeout.outcome import Outcome, is_correct
from rl_accel.reward.graders import Graders
from rl_accel.reward.limited_executor import LimitedExecutor
from rl_accel.reward.program import Limits


@dataclass(frozen=True)
class Call:
    """Whose response is scored.

    Attributes:
        prompt: the same for all responses to one prompt, in every epoch.
        teach: False in a validation.
    """

    prompt: str
    teach: bool


@dataclass(frozen=True)
class AwaitedResult:
    """What came of something that was awaited, in the form of :class:`~rl_accel.reward.graders.GradeResult`."""

    verdict: str
    value: Any = None
    wall: float = 0.0
    cpu: float = 0.0
    waited: float = 0.0
    reason: str = ""


class SyncFunction:
    """A function that runs in a process of its own, forked from one that has imported it: a kill takes all that it started.

    Args:
        executor: slots and limits.
        graders: where it runs.
        above: scores above this are of correct answers.
        fixed: keyword arguments that go over those of a call.
    """

    def __init__(self, executor: LimitedExecutor, graders: Graders, above: float, fixed: Mapping[str, Any]) -> None:
        self._executor = executor
        self._graders = graders
        self._above = above
        self._fixed = dict(fixed)

    async def run(self, call: Call, arguments: dict[str, Any]) -> Outcome:
        """Score one response. Cancelling this kills the execution.

        Raises:
            SandboxError: the function cannot be imported in a process of its own.
        """
        given = {**arguments, **self._fixed}
        return await _execute(self._executor, call, lambda limits: self._graders.call(given, limits), self._above)


class AsyncFunction:
    """A coroutine function. It is awaited here and cancelled at the limit; nothing helps if it blocks the event loop."""

    def __init__(self, executor: LimitedExecutor, function: Callable[..., Awaitable[Any]], above: float) -> None:
        self._executor = executor
        self._function = function
        self._above = above

    async def run(self, call: Call, arguments: dict[str, Any]) -> Outcome:
        """Score one response. Cancelling this cancels the function."""
        return await _execute(
            self._executor, call, lambda limits: _await(self._function(**arguments), limits), self._above
        )


async def _execute(
    executor: LimitedExecutor, call: Call, run: Callable[[Limits], Awaitable[Any]], above: float
) -> Outcome:
    result = await executor.execute(
        call.prompt,
        "",
        run,
        lambda found: found.verdict == "done" and is_correct(found.value, above),
        call.teach,
    )
    if result.verdict == "done":
        return Outcome(result.value)
    if result.verdict == "error":
        return Outcome(problem=f"it raised {result.reason}")
    return Outcome(stopped=f"{result.verdict}: {result.reason}" if result.reason else result.verdict)


async def _await(work: Awaitable[Any], limits: Limits) -> AwaitedResult:
    loop = asyncio.get_running_loop()
    began = loop.time()
    task, over = asyncio.ensure_future(work), loop.create_future()
    with _deadline(began, limits, over):
        try:
            # Not wait_for: a TimeoutError of the function's own, of an HTTP client say, would look like ours.
            await asyncio.wait({task, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended = task.done()
            task.cancel()  # no more than a word once it is done
    wall = loop.time() - began
    if not ended:
        task.add_done_callback(_look)
        return AwaitedResult("timeout", wall=wall, reason=f"cancelled after {wall:.1f} s")
    error = asyncio.CancelledError("the function cancelled itself") if task.cancelled() else task.exception()
    if error is not None:
        return AwaitedResult("error", wall=wall, reason=f"{type(error).__name__}: {error}")
    return AwaitedResult("done", task.result(), wall)


@contextlib.contextmanager
def _deadline(began: float, limits: Limits, over: "asyncio.Future[None]") -> Iterator[None]:
    """Resolve ``over`` at the wall limit, which may move while the block runs."""
    loop = asyncio.get_running_loop()

    def end() -> None:
        if not over.done():
            over.set_result(None)

    def move(wall: float, _cpu: float) -> None:
        nonlocal timer
        timer.cancel()
        timer = loop.call_at(began + min(wall, limits.wall), end)

    timer = loop.call_at(began + limits.wall, end)
    with limits.updates.subscribed(move) if limits.updates else contextlib.nullcontext():
        try:
            yield
        finally:
            timer.cancel()
            over.cancel()


def _look(task: "asyncio.Future[Any]") -> None:
    """Retrieve what a cancelled task raised, so that asyncio does not complain."""
    if not task.cancelled():
        task.exception()
