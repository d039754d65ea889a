"""Limits and result of an execution, and functions that await coroutines within a limit or until one of them fails."""

import asyncio
import contextlib
import logging
import threading
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

import psutil

from rl_accel.reward.grader_threads import threads_of_execution

logger = logging.getLogger("rl_accel")
T = TypeVar("T")

HELD_SECONDS = 1.0
"""Seconds without an await after which a grader is reported: nothing else can run on the event loop meanwhile."""
_running: set["asyncio.Task[Any]"] = set()
"""Tasks that have not ended, including tasks that ignore their cancellation. asyncio itself has only weak references to tasks."""
_reported: set[str] = set()

Verdict = Literal["passed", "wrong", "done", "error", "timeout", "memory", "killed"]
"""Outcome of an execution. passed, wrong: of a program. done: a grader returned. error: the code raised, or a program ended without
a result. killed: a limit other than time or memory stopped it, a grader's process died, or two workers died executing it."""
SetLimits = Callable[[float, float], None]
"""Callback for new limits: wall and CPU seconds, both counted from the start of the execution."""


class LimitUpdates:
    """Passes new limits from the policy to the code that enforces them. Limits published before a subscription are kept."""

    def __init__(self) -> None:
        self._latest: tuple[float, float] | None = None
        self._set_limits: SetLimits | None = None

    def publish(self, wall: float, cpu: float) -> None:
        """Sets the limits to ``wall`` and ``cpu`` seconds in total. Without a subscriber, only stores the limits."""
        if self._latest != (wall, cpu):
            self._latest = wall, cpu
            if self._set_limits is not None:
                self._set_limits(wall, cpu)

    @contextlib.contextmanager
    def subscribed(self, set_limits: SetLimits) -> Iterator[None]:
        """Calls ``set_limits`` for limits published within the block, and at once for the latest earlier limits."""
        self._set_limits = set_limits
        try:
            if self._latest is not None:
                set_limits(*self._latest)
            yield
        finally:
            self._set_limits = None


@dataclass(frozen=True)
class Limits:
    """Resource limits of one execution.

    Args:
        wall: seconds from start to end, without the seconds in which the execution was ready but waited for a processor.
        cpu: CPU seconds of all processes together.
        memory: bytes of address space of each process, in addition to the worker's, and of resident memory of all together.
        processes: maximum number of processes and threads at once.
        file_bytes: maximum size of a file that the execution writes.
        output_bytes: maximum size of the printed text; more stops the execution. Only the beginning is returned.
        updates: changes ``wall`` and ``cpu`` during the execution.

    Raises:
        ValueError: a limit is not above 0.
    """

    wall: float = 30.0
    cpu: float = 30.0
    memory: int = 1 << 30
    processes: int = 32
    file_bytes: int = 64 << 20
    output_bytes: int = 1 << 20
    updates: LimitUpdates = field(default_factory=LimitUpdates, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in self.numbers().items():
            if not value > 0:
                raise ValueError(f"{name} must be above 0, found {value!r}")

    def numbers(self) -> dict[str, float]:
        """Returns all limits by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "updates"}


@dataclass(frozen=True)
class ExecutionResult:
    """Result of an execution.

    Attributes:
        verdict: see :data:`Verdict`.
        value: return value of a grader; None unless the verdict is "done".
        wall, cpu: wall seconds of the execution, and CPU seconds of all its processes.
        waited: seconds of ``wall`` in which the execution was ready but had no processor: the sum over its threads, at most
            ``wall - cpu``. 0 if the kernel does not report them.
        reason: short text: the exception, or the limit that was exceeded.
        output: beginning of the text that a program or an isolated grader printed.
        error: exception that a trusted grader raised.
    """

    verdict: Verdict
    value: Any = None
    wall: float = 0.0
    cpu: float = 0.0
    waited: float = 0.0
    reason: str = ""
    output: str = ""
    error: Exception | None = None


async def run_within(coroutine: Coroutine[Any, Any, Any], limits: Limits, name: str) -> ExecutionResult:
    """Awaits ``coroutine`` for at most ``limits.wall`` seconds, or for the wall limit that ``limits.updates`` publishes.

    At the limit, or if this call is cancelled, the coroutine is cancelled, but not awaited any further. The processes that the
    coroutine has started are then killed with all descendants; processes that other tasks or threads started for it are not.

    Args:
        coroutine: a coroutine, not yet awaited.
        limits: only ``wall`` is enforced; the other limits are neither enforced nor measured.
        name: the grader's name, for the warning if the grader blocks the event loop.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    started: set[int] = set()
    with threads_of_execution(loop) as give_up_threads:
        task = asyncio.ensure_future(_steps(coroutine, name, started))
    _running.add(task)
    task.add_done_callback(_forget)
    deadline = asyncio.timeout(limits.wall)

    def move(wall: float, _cpu: float) -> None:
        if not deadline.expired():
            deadline.reschedule(began + wall)

    try:
        async with deadline:
            with limits.updates.subscribed(move):
                await asyncio.wait({task})  # never raises the grader's errors: a TimeoutError is ours
    except TimeoutError:
        pass
    finally:
        if not task.done():
            task.cancel()
            _kill(started)
            give_up_threads()
    verdict: Verdict = "error"
    value, reason, raised = None, "", None
    if not task.done():
        verdict, reason = "timeout", "wall limit"
    elif task.cancelled():
        reason = "it was cancelled, and not by us"
    elif error := task.exception():
        reason = f"{type(error).__name__}: {error}"[:500]
        raised = error if isinstance(error, Exception) else None
    else:
        verdict, value = "done", task.result()
    return ExecutionResult(verdict, value, wall=loop.time() - began, reason=reason, error=raised)


async def gather_until(awaitables: Iterable[Awaitable[T]], ends: Callable[[T], bool] = lambda _: False) -> list[T]:
    """Awaits all awaitables at once and returns the results in order.

    Once an awaitable raises, or ``ends`` is true of a result, the others are cancelled and missing in the list.
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
    """Runs a coroutine. Warns at the first long step between two awaits, and adds the processes started to ``started``."""
    value, error = None, None
    while True:
        began, before = time.monotonic(), _children()
        try:
            awaited = coroutine.send(value) if error is None else coroutine.throw(error)
        except StopIteration as end:
            return end.value
        except SystemExit as exit_:  # SystemExit would end the thread of the event loop
            raise RuntimeError(f"SystemExit: {exit_.code}") from exit_
        finally:
            seconds = time.monotonic() - began
            started |= _children() - before
            if seconds > HELD_SECONDS and name not in _reported:
                _reported.add(name)
                logger.warning(
                    "rl-accel: %s held the event loop for %.1f s, while no response could go on; as a plain function (no async)"
                    " it would run in a process of its own, which can be stopped",
                    name,
                    seconds,
                )
        value, error = None, None
        try:
            value = yield awaited
        except BaseException as thrown:
            error = thrown


def _children() -> set[int]:
    """Returns this thread's child processes that nobody has waited for; an empty set if the kernel does not report them."""
    try:
        with open(f"/proc/self/task/{threading.get_native_id()}/children") as file:
            return set(map(int, file.read().split()))
    except OSError:
        return set()


def _kill(started: set[int]) -> None:
    for pid in started & _children():  # other pids may belong to new processes by now
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (*psutil.Process(pid).children(recursive=True), psutil.Process(pid)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def _forget(task: "asyncio.Task[Any]") -> None:
    _running.discard(task)
    if not task.cancelled():
        task.exception()  # marks the exception as retrieved, or asyncio would log it
