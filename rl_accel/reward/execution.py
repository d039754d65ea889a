"""Limits and results of executions (a program under test, or a call of a grader), and helpers that await coroutines."""

import asyncio
import contextlib
import functools
import threading
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import psutil

from rl_accel.log import warn_once
from rl_accel.reward.grader_threads import threads_of_execution

T = TypeVar("T")

HELD_SECONDS = 1.0
"""Seconds between two awaits of a coroutine grader above which a warning says that it blocks the event loop. Chosen by hand."""
_running: set["asyncio.Task[Any]"] = set()
"""Running tasks of coroutine graders. Kept here because asyncio itself has only weak references to tasks."""

Verdict = Literal["passed", "wrong", "done", "error", "timeout", "memory", "killed"]
"""Outcome of an execution (a program under test, or a call of a grader).

passed, wrong: the result of a program is the expected one, or another one.
done: a grader returned a value.
error: the code raised an exception, or a program ended without a result.
timeout, memory: the execution exceeded its time limit or its memory limit.
killed: the execution exceeded another limit, the process of a grader died, or two workers died on the same request."""


@dataclass(frozen=True)
class Limits:
    """Resource limits of one execution (a program under test, or a call of a grader).

    Args:
        wall: wall seconds from start to end, without waits for a processor.
        cpu: CPU seconds of all processes together.
        memory: bytes of address space of each process (beyond that of its worker), and of resident memory of all together.
        processes: number of processes and threads that exist at the same time.
        file_bytes: size in bytes of a file that the execution writes.
        output_bytes: size in bytes of the printed text. More text stops the execution.
        latest: function that returns new values of ``wall`` and ``cpu`` during the execution; None: they do not change.
        check_seconds: seconds between two calls of ``latest``.
        full: full budget in seconds, up to which a call in a new process of a grader may exceed ``wall`` and ``cpu``, because it
            may first have to load something, such as a model. None: no call may exceed them.
        kind: name of a group of calls for which a grader loads the same things. Example: the data source.

    Raises:
        ValueError: a limit is not above 0.
    """

    wall: float = 30.0
    cpu: float = 30.0
    memory: int = 1 << 30
    processes: int = 32
    file_bytes: int = 64 << 20
    output_bytes: int = 1 << 20
    latest: Callable[[], tuple[float, float]] | None = field(default=None, repr=False, compare=False)
    check_seconds: float = 1.0
    full: float | None = None
    kind: str = ""

    def __post_init__(self) -> None:
        for name, value in self.numbers().items():
            if not value > 0:
                raise ValueError(f"{name} must be above 0, found {value!r}")

    def numbers(self) -> dict[str, float]:
        """Returns the limits that a worker enforces, by name."""
        names = ("wall", "cpu", "memory", "processes", "file_bytes", "output_bytes")
        return {name: getattr(self, name) for name in names}

    def times(self) -> tuple[float, float]:
        """Returns the present limits of wall seconds and CPU seconds, which may have changed since the start."""
        return self.latest() if self.latest else (self.wall, self.cpu)


@dataclass(frozen=True)
class ExecutionResult:
    """Result of an execution (a program under test, or a call of a grader).

    Attributes:
        verdict: outcome, see :data:`Verdict`.
        value: return value of a grader; None unless ``verdict`` is "done".
        wall, cpu: wall seconds of the execution, and CPU seconds of all its processes. ``cpu`` is 0 for a coroutine grader, and
            for a very short call of a grader without isolation.
        waited: seconds in which the execution was ready to run but had no processor, summed over its threads; at most
            ``wall - cpu``, and 0 if unknown.
        reason: short text that names the exception or the exceeded limit; "" if there is none.
        output: beginning of the text that a program or an isolated grader printed.
        error: exception that a grader without isolation raised; None if there is none.
        prove: None, or a function to call if the result is correct. It records that the grader's process has loaded what it needs,
            and gets no extra time for this any more.
    """

    verdict: Verdict
    value: Any = None
    wall: float = 0.0
    cpu: float = 0.0
    waited: float = 0.0
    reason: str = ""
    output: str = ""
    error: Exception | None = None
    prove: Callable[[], None] | None = field(default=None, repr=False, compare=False)


async def run_within(coroutine: Coroutine[Any, Any, Any], limits: Limits, name: str) -> ExecutionResult:
    """Awaits a coroutine grader until the wall limit. Returns the result of this execution.

    At the limit, or if this call is cancelled, cancels the coroutine and does not wait for its end. Also kills the processes that
    the coroutine has started, and their descendants, but no processes that other tasks or threads have started for it.

    Args:
        coroutine: the call of the grader, not yet awaited.
        limits: resource limits, of which only ``wall`` is enforced, with its changes during the execution.
        name: name of the grader in the warning that it blocks the event loop.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    started: set[int] = set()
    with threads_of_execution(loop) as give_up_threads:
        task = asyncio.ensure_future(_steps(coroutine, name, started))
    _running.add(task)
    task.add_done_callback(_running.discard)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio would log the exception
    limit = limits.wall
    try:
        while not task.done() and (left := began + limit - loop.time()) > 0:
            await asyncio.wait({task}, timeout=min(left, limits.check_seconds))
            if left > limits.check_seconds and not task.done():
                limit = limits.times()[0]
    finally:
        if not task.done():
            task.cancel()
            _kill(started)
            give_up_threads()
    wall = loop.time() - began
    if not task.done():
        return ExecutionResult("timeout", wall=wall, reason="wall limit")
    if task.cancelled():
        return ExecutionResult("error", wall=wall, reason="the grader was cancelled by other code")
    if error := task.exception():
        raised = error if isinstance(error, Exception) else None
        return ExecutionResult("error", wall=wall, reason=f"{type(error).__name__}: {error}"[:500], error=raised)
    return ExecutionResult("done", task.result(), wall)


async def gather_until(awaitables: Iterable[Awaitable[T]], ends: Callable[[T], bool] = lambda _: False) -> list[T]:
    """Awaits all ``awaitables`` concurrently and returns their results in order.

    If ``ends(result)`` is true for one result, cancels the others and returns the results so far. If one raises an exception,
    cancels the others and raises this exception.
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


@types.coroutine
def _steps(coroutine: Coroutine[Any, Any, Any], name: str, started: set[int]) -> Generator[Any, Any, Any]:
    """Runs the ``coroutine`` of the grader ``name`` step by step; a step is the code between two awaits.

    Warns if a step takes longer than :data:`HELD_SECONDS`. Adds to ``started`` the pids of child processes that the steps start.
    """
    step = functools.partial(coroutine.send, None)
    while True:
        began, before = time.monotonic(), _children()
        try:
            awaited = step()
        except StopIteration as end:
            return end.value
        except SystemExit as exit_:  # SystemExit would end the thread of the event loop
            raise RuntimeError(f"SystemExit: {exit_.code}") from exit_
        finally:
            seconds = time.monotonic() - began
            started |= _children() - before
            if seconds > HELD_SECONDS:
                warn_once(
                    ("held", name),
                    "rl-accel: %s held the event loop for %.1f s, while no response could go on; as a plain function (no async)"
                    " it would run in a process of its own, which can be stopped",
                    name,
                    seconds,
                )
        try:
            step = functools.partial(coroutine.send, (yield awaited))
        except BaseException as thrown:
            step = functools.partial(coroutine.throw, thrown)


def _children() -> set[int]:
    """Returns the pids of child processes of this thread; empty if the kernel does not report them."""
    try:
        with open(f"/proc/self/task/{threading.get_native_id()}/children") as file:
            return set(map(int, file.read().split()))
    except OSError:
        return set()


def _kill(started: set[int]) -> None:
    parents = started & _children()  # other pids may belong to new processes by now
    stopped: list[psutil.Process] = []
    while parents:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(parents.pop())
            # stopped before its children are listed, because it may start a new child when one is killed
            process.suspend()
            stopped.append(process)
            parents |= {child.pid for child in process.children()}
    for process in stopped:
        with contextlib.suppress(psutil.Error):
            process.kill()
