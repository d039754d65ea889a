"""What an execution may use, and what came of it; and coroutines that are awaited within a limit, or until one of them fails."""

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
"""A grader that runs for so long without awaiting anything is reported: nothing else happens on the event loop meanwhile."""
_running: set["asyncio.Task[Any]"] = set()
"""Tasks that have not ended, those that ignore their cancellation among them. asyncio itself holds tasks weakly."""
_reported: set[str] = set()

Verdict = Literal["passed", "wrong", "done", "error", "timeout", "memory", "killed"]
"""passed, wrong: of a program. done: a grader returned. error: it raised, or ended without a result. killed: it was stopped for a
limit other than time or memory, ended a grader without returning, or took two workers with it."""
SetLimits = Callable[[float, float], None]
"""Takes new limits: wall and processor seconds, both from the start of the execution."""


class LimitUpdates:
    """Passes new limits from the policy to whoever enforces them. One published before anybody has subscribed is kept."""

    def __init__(self) -> None:
        self._latest: tuple[float, float] | None = None
        self._set_limits: SetLimits | None = None

    def publish(self, wall: float, cpu: float) -> None:
        """Let the execution have ``wall`` and ``cpu`` seconds in all. Without a subscriber it is only kept."""
        if self._latest != (wall, cpu):
            self._latest = wall, cpu
            if self._set_limits is not None:
                self._set_limits(wall, cpu)

    @contextlib.contextmanager
    def subscribed(self, set_limits: SetLimits) -> Iterator[None]:
        """Within the block, have ``set_limits`` called for what is published, and at once for the latest of before."""
        self._set_limits = set_limits
        try:
            if self._latest is not None:
                set_limits(*self._latest)
            yield
        finally:
            self._set_limits = None


@dataclass(frozen=True)
class Limits:
    """What one execution may use.

    Args:
        wall: seconds from start to end, less those in which it was ready and had to wait for a processor.
        cpu: seconds of processor time, all its processes together.
        memory: bytes of address space of each process, beyond what the worker has, and of resident memory of all together.
        processes: how many there may be at once, threads included.
        file_bytes: size of a file it writes.
        output_bytes: what it may print; more stops it. Only the beginning is returned.
        updates: changes ``wall`` and ``cpu`` while it runs.

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
        """Return all limits by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "updates"}


@dataclass(frozen=True)
class ExecutionResult:
    """What came of an execution.

    Attributes:
        verdict: see :data:`Verdict`.
        value: what a grader returned; None unless the verdict is "done".
        wall, cpu: seconds it took, of all its processes.
        waited: seconds of ``wall`` in which it was ready and had no processor, the sum over its threads, and no more than
            ``wall - cpu``. 0 where the kernel does not tell.
        reason: in a few words: the exception, the limit that it exceeded.
        output: the beginning of what a program, or an isolated grader, printed.
        error: what a trusted grader raised.
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
    """Await ``coroutine`` for at most ``limits.wall`` seconds, or what ``limits.updates`` says meanwhile.

    At the limit it is cancelled, and so it is if this call is cancelled. One that ignores its cancellation is no longer waited for.
    Processes that it has started, and those below them, are killed then; not those that other tasks or threads started for it.

    Args:
        coroutine: a coroutine, not yet awaited.
        limits: ``cpu`` and the others are not enforced, nor measured.
        name: of the grader, for the warning if it holds the event loop.
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
                await asyncio.wait({task})  # raises nothing of the grader's: a TimeoutError is ours
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


@types.coroutine
def _steps(coroutine: Coroutine[Any, Any, Any], name: str, started: set[int]) -> Generator[Any, Any, Any]:
    """Run a coroutine; report the first step from one await to the next that takes long, and add to ``started`` its processes."""
    value, error = None, None
    while True:
        began, before = time.monotonic(), _children()
        try:
            awaited = coroutine.send(value) if error is None else coroutine.throw(error)
        except StopIteration as end:
            return end.value
        except SystemExit as exit_:  # it would end the thread of the event loop
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
    """Processes that this thread has started and that nobody has waited for; none where the kernel does not tell."""
    try:
        with open(f"/proc/self/task/{threading.get_native_id()}/children") as file:
            return set(map(int, file.read().split()))
    except OSError:
        return set()


def _kill(started: set[int]) -> None:
    for pid in started & _children():  # those of the others may be numbers of other processes by now
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (*psutil.Process(pid).children(recursive=True), psutil.Process(pid)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def _forget(task: "asyncio.Task[Any]") -> None:
    _running.discard(task)
    if not task.cancelled():
        task.exception()  # retrieved, or asyncio would log it
