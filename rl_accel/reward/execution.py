"""Limits and results of executions (a program under test, or a call of a grader), and helpers that await coroutines."""

import asyncio
import contextlib
import threading
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

import psutil

from rl_accel.log import warn_once
from rl_accel.reward.grader_threads import threads_of_execution

T = TypeVar("T")

HELD_SECONDS = 1.0
"""Seconds between two awaits of a coroutine grader above which a warning is logged, because the grader blocks the event loop."""
_running: set["asyncio.Task[Any]"] = set()
"""Tasks of coroutine graders that have not ended, including tasks that ignore their cancellation.

This set keeps the tasks alive, because asyncio itself has only weak references to tasks."""

Verdict = Literal["passed", "wrong", "done", "error", "timeout", "memory", "killed"]
"""Outcome of an execution (a program under test, or a call of a grader).

passed, wrong: the result of a program is the expected one, or another one.
done: a grader returned a value.
error: the code raised an exception, or a program ended without a result.
timeout, memory: the execution exceeded its time limit or its memory limit.
killed: the execution exceeded another limit, the process of a grader died, or two workers died on the same request."""


class LimitUpdates:
    """Passes new time limits of a running execution from the policy that computes them to a subscriber that enforces them.

    Limits published before the subscription are kept. Only the latest limits count.
    """

    def __init__(self) -> None:
        self._latest: tuple[float, float] | None = None
        self._set_limits: Callable[[float, float], None] | None = None

    def publish(self, wall: float, cpu: float) -> None:
        """Stores new limits, in seconds since the start of the execution. Passes changed limits on to the subscriber."""
        if self._latest != (wall, cpu):
            self._latest = wall, cpu
            if self._set_limits is not None:
                self._set_limits(wall, cpu)

    @contextlib.contextmanager
    def subscribed(self, set_limits: Callable[[float, float], None]) -> Iterator[None]:
        """Context manager that calls ``set_limits(wall, cpu)`` for all limits that are published within the block.

        If limits were published before the block, first calls ``set_limits`` with the latest of these limits.
        """
        self._set_limits = set_limits
        try:
            if self._latest is not None:
                set_limits(*self._latest)
            yield
        finally:
            self._set_limits = None


@dataclass(frozen=True)
class Limits:
    """Resource limits of one execution (a program under test, or a call of a grader).

    Args:
        wall: wall seconds from start to end. Seconds in which the execution was ready but waited for a processor do not count.
        cpu: CPU seconds of all processes of the execution together.
        memory: maximum number of bytes of address space of each process (in addition to the address space of its worker), and of
            resident memory of all processes together.
        processes: maximum number of processes and threads that exist at the same time.
        file_bytes: maximum size in bytes of a file that the execution writes.
        output_bytes: maximum size in bytes of the printed text. More text stops the execution. The result contains only the
            beginning of the text.
        updates: source of new values of ``wall`` and ``cpu`` during the execution.
        full: full budget (longest allowed time) in seconds. A call of a trusted grader in a new process may exceed ``wall`` and
            ``cpu`` up to this time, see :class:`~rl_accel.reward.worker_pool.EarlyCall`. None: no call may exceed them.
        kind: name of a group of calls for which a grader loads the same things, such as a model. Example: the data source.

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
    full: float | None = None
    kind: str = ""

    def __post_init__(self) -> None:
        for name, value in self.numbers().items():
            if not value > 0:
                raise ValueError(f"{name} must be above 0, found {value!r}")

    def numbers(self) -> dict[str, float]:
        """Returns the limits that a worker enforces, by name: all fields except ``updates``, ``full`` and ``kind``."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("updates", "full", "kind")}


@dataclass(frozen=True)
class ExecutionResult:
    """Result of an execution (a program under test, or a call of a grader).

    Attributes:
        verdict: outcome of the execution, see :data:`Verdict`.
        value: return value of a grader; None unless ``verdict`` is "done".
        wall, cpu: wall seconds of the execution, and CPU seconds of all its processes. The CPU seconds of a coroutine grader,
            and of a very short call of another trusted grader, are not measured and given as 0.
        waited: seconds in which the execution was ready to run but had no processor. This is the sum over all threads of the
            execution, at most ``wall - cpu``. 0 if the kernel does not report these seconds.
        reason: short text that names the exception or the exceeded limit; "" if there is none.
        output: beginning of the text that a program or an isolated grader printed.
        error: exception that a trusted grader raised; None if there is none.
        prove: None, or a function to call if the result is correct. Present in results of a trusted grader whose process is new:
            it has not given a correct result yet (for this ``Limits.kind``), so that ``wall`` may include the loading of a
            model. The function records that the process is no longer new.
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

    The wall limit is ``limits.wall`` seconds, until ``limits.updates`` publishes another wall limit. At the limit, or if this call
    is cancelled, the coroutine is cancelled, but not awaited any further. Processes that the coroutine has started are then killed
    with all their descendants. Processes that other tasks or threads have started for the coroutine are not killed.

    Args:
        coroutine: the call of the grader, not yet awaited.
        limits: resource limits. Only ``wall`` is enforced; the other limits are neither enforced nor measured.
        name: name of the grader, printed in the warning that the grader blocks the event loop.
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
                await asyncio.wait({task})  # never raises the grader's own TimeoutError
    except TimeoutError:
        pass
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

    Once ``ends(result)`` is true for a result, the unfinished awaitables are cancelled, and their results are missing in the list.
    Once an awaitable raises an exception, the unfinished awaitables are cancelled, and the exception is raised.
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

    Logs a warning at the first step of the grader that takes longer than :data:`HELD_SECONDS`. Adds to the set ``started`` the
    pids of child processes that the steps have started.
    """
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
            if seconds > HELD_SECONDS:
                warn_once(
                    ("held", name),
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
    """Returns the pids of this thread's child processes that were not reaped. Empty if the kernel reports no children."""
    try:
        with open(f"/proc/self/task/{threading.get_native_id()}/children") as file:
            return set(map(int, file.read().split()))
    except OSError:
        return set()


def _kill(started: set[int]) -> None:
    """Kills the processes in ``started`` (pids) and their descendants.

    Each process is stopped before its children are listed, because it may start a new child when a child is killed.
    """
    parents = started & _children()  # other pids may belong to new processes by now
    stopped: list[psutil.Process] = []
    while parents:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(parents.pop())
            process.suspend()
            stopped.append(process)
            parents |= {child.pid for child in process.children()}
    for process in stopped:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _forget(task: "asyncio.Task[Any]") -> None:
    _running.discard(task)
    if not task.cancelled():
        task.exception()  # marks the exception as retrieved, or asyncio would log it
