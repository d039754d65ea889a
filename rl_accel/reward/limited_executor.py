"""Runs reward executions (programs under test, or calls of graders) under adaptive time limits, and learns from the results.

All code here runs in the process that grades: verl's reward worker or slime's rollout manager.
"""

import asyncio
import functools
import hashlib
import json
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from rl_accel.reward.adaptive_timeout import Limit, LocalAnchors

logger = logging.getLogger("rl_accel")
T = TypeVar("T")

_CHECKS_PER_MINIMUM = 4
"""Number of times that the limit of a running execution is looked up within the shortest adaptive limit. Chosen by hand."""
_CHECKS_PER_BUDGET = 8
"""Number of times that it is looked up within the full budget (the longest limit), if limits do not adapt. Chosen by hand."""
_SHORTEST_CHECK_SECONDS = 0.02
_MOST_BUDGETS = 10
"""Maximum run time of a grader that waits for a resource that others hold, as a multiple of the full budget. Chosen by hand."""
_WARN_AFTER_EXECUTIONS = (8, 64, 512, 4096)
"""Numbers of executions after which a warning is logged if all of them have exceeded their time limits."""
_stopped: set["asyncio.Task[Any]"] = set()
"""Tasks of coroutine graders that were stopped. Kept until they end, because asyncio itself has only weak references to tasks."""

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
        cpu: CPU seconds of all processes of a program together. Graders have no such limit.
        memory: bytes of address space of each process of a program, and of the memory of all together.
        processes: number of processes and threads of a program that exist at the same time.
        file_bytes: size in bytes of a file that a program writes.
        output_bytes: size in bytes of the text that a program prints. More text stops it.
        latest: function that returns new values of ``wall`` and ``cpu`` during the execution; None: they do not change.
        check_seconds: seconds between two calls of ``latest``.
        full: full budget in seconds, up to which a call in a new process of a grader may exceed ``wall``, because it may first
            have to load something, such as a model. None: no call may exceed it.
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
        """Returns the limits of a program, by name."""
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
        value: return value of a grader or of a judge; None unless ``verdict`` is "done".
        wall, cpu: wall seconds of the execution, and CPU seconds of all its processes. ``cpu`` is 0 for a grader.
        reason: short text that names the exception or the exceeded limit; "" if there is none.
        output: beginning of the text that a program printed.
        error: exception that a grader raised; None if there is none.
        prove: None, or a function to call if the result is correct. It records that the grader's process has loaded what it needs,
            and gets no extra time for this any more.
    """

    verdict: Verdict
    value: Any = None
    wall: float = 0.0
    cpu: float = 0.0
    reason: str = ""
    output: str = ""
    error: Exception | None = None
    prove: Callable[[], None] | None = field(default=None, repr=False, compare=False)


async def run_within(coroutine: Coroutine[Any, Any, Any], limits: Limits) -> ExecutionResult:
    """Awaits a coroutine grader until the wall limit, the only one that is enforced. Returns the result of this execution.

    At the limit, or if this call is cancelled, cancels the coroutine and does not wait for its end. Processes and threads that the
    coroutine has started live on.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    task = asyncio.create_task(_without_exit(coroutine))
    try:
        while not task.done() and (left := began + limits.times()[0] - loop.time()) > 0:
            await asyncio.wait({task}, timeout=min(left, limits.check_seconds))
    finally:
        if not task.done():
            task.cancel()
            _stopped.add(task)
            task.add_done_callback(_stopped.discard)
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # or asyncio would log it
    wall = loop.time() - began
    if not task.done():
        return ExecutionResult("timeout", wall=wall, reason="wall limit")
    if task.cancelled():
        return ExecutionResult("error", wall=wall, reason="the grader was cancelled by other code")
    if error := task.exception():
        raised = error if isinstance(error, Exception) else None
        return ExecutionResult("error", wall=wall, reason=f"{type(error).__name__}: {error}"[:500], error=raised)
    return ExecutionResult("done", task.result(), wall)


async def _without_exit(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await coroutine
    except SystemExit as exit_:  # SystemExit would end the thread of the event loop
        raise RuntimeError(f"SystemExit: {exit_.code}") from exit_


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


def prompt_key(*parts: Any) -> str:
    """Returns a digest of the values that define a prompt, such as text and ground truth. Equal in every run and process."""
    try:
        text = json.dumps(parts, default=repr, sort_keys=True)
    except (TypeError, ValueError):  # dict keys that JSON does not support or that cannot be sorted
        text = repr(parts)
    text = re.sub(r" at 0x[0-9a-f]+", "", text)  # the repr of an object may hold its address
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


@dataclass(eq=False)
class _Running:
    """A running execution of ``key`` (a prompt and test case). Times are on the event loop's clock.

    ``stopped``: time at which a :class:`_Queue` chose it to stop; 0 if it has not.
    """

    key: str
    began: float
    limit: Limit
    stopped: float = 0.0


class _Queue:
    """Full budgets of executions that may wait for a resource that others of them hold, such as one of a few connections.

    Which executions hold the resource is unknown. If it is handed out in order, those that have run longest hold it. So each time
    that nothing has ended within a full budget, the longest running execution is stopped, and the budgets of the others begin anew.
    As long as that lets no other one end, twice as many are stopped each time.
    """

    def __init__(self, maximum: float) -> None:
        self._maximum = maximum
        self._running: list[_Running] = []  # by start time, without those that are to stop
        self._renewed = 0.0  # time at which all budgets began anew
        self._next_to_stop = 1

    def add(self, running: _Running) -> None:
        self._running.append(running)

    def remove(self, running: _Running, in_time: bool) -> None:
        if running in self._running:
            self._running.remove(running)
        if in_time:
            self._renewed = asyncio.get_running_loop().time()
            self._next_to_stop = 1

    def limit(self, running: _Running) -> Limit:
        """Returns the present limit of a running execution, counted from its start."""
        now = asyncio.get_running_loop().time()
        if self._running and now >= self._due():
            for longest in self._running[: self._next_to_stop]:
                longest.stopped = now
            del self._running[: self._next_to_stop]
            self._renewed = now
            self._next_to_stop *= 2
        seconds = running.stopped - running.began
        if running in self._running:
            seconds = min(self._due() - running.began, _MOST_BUDGETS * self._maximum)
        return Limit(seconds, seconds, "learning")

    def _due(self) -> float:
        return max(self._renewed, self._running[0].began) + self._maximum


class LimitedExecutor:
    """Runs at most ``slots`` executions at once under adaptive time limits; further calls wait for a slot.

    The policy (:class:`~rl_accel.reward.adaptive_timeout.AdaptiveTimeout`) gives each execution the full budget or an adaptive
    limit. A running execution with the full budget gets an adaptive limit, counted from its start, as soon as enough other
    executions of its test case were correct. A probe keeps the full budget. ``docs/metrics.md`` describes the counts that are added
    to ``anchors``.

    Args:
        anchors: longest correct executions, and counts of executions, of this process.
        slots: maximum number of executions that run at once.
        limits: resource limits of an execution. The policy replaces the wall and CPU seconds.
        maximum: full budget in seconds; None: the full budget of the policy.
        adapts: False to give each execution the full budget, for graders whose time depends on other services.
        queues: for ``adapts=False``: True if a grader may wait for a resource that other graders hold, such as one of a few
            connections. Then the longest running are stopped first, and the budgets of the others begin anew, up to ten times.
    """

    def __init__(
        self,
        anchors: LocalAnchors,
        slots: int,
        limits: Limits | None = None,
        maximum: float | None = None,
        adapts: bool = True,
        queues: bool = True,
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots must be at least 1, found {slots!r}")
        self.anchors = anchors
        self.limits = limits or Limits()
        self._slots = asyncio.Semaphore(slots)
        self._maximum = maximum or anchors.timeout.maximum
        self._adapts = adapts
        self._queue = _Queue(self._maximum) if queues and not adapts else None
        checks = anchors.timeout.flags.minimum / _CHECKS_PER_MINIMUM if adapts else self._maximum / _CHECKS_PER_BUDGET
        self._check_seconds = max(checks, _SHORTEST_CHECK_SECONDS)
        self._ended = 0
        self._timed_out = 0

    async def execute(
        self,
        prompt: str,
        case: str,
        run: Callable[[Limits], Awaitable[ExecutionResult]],
        correct: Callable[[ExecutionResult], bool],
        teach: bool = True,
    ) -> ExecutionResult:
        """Runs one execution within adaptive limits once a slot is free. Cancelling this call cancels ``run``.

        Args:
            prompt: key of the prompt.
            case: name of the test case. Limits are learned for each pair of prompt and case.
            run: async function that executes the grader or program within the given limits, and returns the result.
            correct: function that returns True for a correct result. Limits are learned from correct executions only.
            teach: False for an evaluation, which uses the learned limits but does not change them.
        """
        loop = asyncio.get_running_loop()
        came = loop.time()
        self.anchors.running += 1
        try:
            async with self._slots:
                began = loop.time()
                running, result = await self._run(f"{prompt}/{case}", run)
        except asyncio.CancelledError:
            self.anchors.count("cancelled")
            raise
        finally:
            self.anchors.running -= 1
        self._note_end(result)
        is_correct = correct(result)
        if result.prove and is_correct:
            result.prove()
        if not teach:
            self.anchors.count("eval_executions")
            return result
        if self._adapts:
            self.anchors.record(running.key, result.wall, result.cpu, is_correct)
        self._count(result, running.limit, is_correct, began - came)
        return result

    async def _run(
        self, key: str, run: Callable[[Limits], Awaitable[ExecutionResult]]
    ) -> tuple[_Running, ExecutionResult]:
        limit = Limit(self._maximum, self._maximum, "learning")
        if self._adapts:
            limit = self.anchors.timeout.limit(key, self._maximum)
        running = _Running(key, asyncio.get_running_loop().time(), limit)
        limits = replace(
            self.limits,
            wall=limit.wall,
            cpu=limit.cpu,
            latest=functools.partial(self._latest, running),
            check_seconds=self._check_seconds,
            full=self._maximum,
        )
        if self._queue is None:
            return running, await run(limits)
        self._queue.add(running)
        in_time = False
        try:
            result = await run(limits)
            in_time = result.verdict != "timeout"
            return running, result
        finally:
            self._queue.remove(running, in_time)

    def _latest(self, running: _Running) -> tuple[float, float]:
        """Updates and returns the limits (wall and CPU seconds) of a running execution."""
        # Most executions that hang begin before a limit is known: all responses of a prompt are graded at about the same time.
        if self._queue is not None:
            running.limit = self._queue.limit(running)
        elif self._adapts and running.limit.reason == "learning":
            running.limit = self.anchors.timeout.limit(running.key, self._maximum)
        elif self._adapts and running.limit.reason == "adaptive":
            running.limit = self.anchors.timeout.learned(running.key, self._maximum)
        return running.limit.wall, running.limit.cpu

    def _count(self, result: ExecutionResult, limit: Limit, is_correct: bool, waited: float) -> None:
        """Adds an ended execution to the counts. ``limit``: time limits at its end; ``waited``: seconds of waiting for a slot."""
        timed_out = result.verdict == "timeout"
        was_early = timed_out and limit.reason == "adaptive"
        for name, amount in (
            ("executions", 1),
            ("correct", is_correct),
            ("timeouts", timed_out),
            ("timeouts_full", timed_out and not was_early),
            ("killed", result.verdict in ("killed", "memory")),
            ("probes", limit.reason == "probe"),
            ("seconds", result.wall),
            ("waited_seconds", waited),
            ("saved_seconds", max(self._maximum - result.wall, 0.0) if was_early else 0.0),
        ):
            self.anchors.count(name, float(amount))

    def _note_end(self, result: ExecutionResult) -> None:
        """Counts an execution as ended in time or timed out. Logs a warning if every execution so far has timed out."""
        if result.verdict != "timeout":
            self._ended += 1
            return
        self._timed_out += 1
        if not self._ended and self._timed_out in _WARN_AFTER_EXECUTIONS:
            logger.warning(
                "rl-accel: none of the first %d answers could be graded within %g s, and all get timeout_score; if they only"
                " take long, raise rl_accel.reward_timeout.maximum",
                self._timed_out,
                self._maximum,
            )
