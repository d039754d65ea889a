"""Runs reward executions under adaptive time limits: schedules the executions, applies the limits, and learns from the results."""

import asyncio
import contextlib
import functools
import hashlib
import heapq
import itertools
import json
import logging
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from rl_accel.reward.adaptive_timeout import Limit
from rl_accel.reward.anchor_store import LocalAnchors
from rl_accel.reward.execution import ExecutionResult, Limits, gather_until
from rl_accel.reward.sandbox import Case, Sandbox

logger = logging.getLogger("rl_accel")

_CHECKS_PER_MINIMUM, _CHECKS_PER_BUDGET, _SHORTEST_CHECK_SECONDS = 4, 8, 0.02
"""The time limit of a running execution may change. It is looked up ``_CHECKS_PER_MINIMUM`` times within the shortest adaptive
limit or, if limits do not adapt, ``_CHECKS_PER_BUDGET`` times within the full budget (the longest limit). Two checks are at least
``_SHORTEST_CHECK_SECONDS`` apart. Chosen by hand."""
_MOST_BUDGETS = 10
"""Maximum run time of a grader that waits for a resource that others hold, as a multiple of the full budget (the longest limit).
Chosen by hand."""
_WARN_AFTER_EXECUTIONS = (8, 64, 512, 4096)
"""Numbers of executions after which a warning is logged if all of them have exceeded their time limits."""


def prompt_key(*parts: Any) -> str:
    """Returns a digest of the values that define a prompt, such as text and ground truth. Equal in every run and process."""
    try:
        text = json.dumps(parts, default=repr, sort_keys=True)
    except (TypeError, ValueError):  # dict keys that JSON does not support or that cannot be sorted
        text = repr(parts)
    text = re.sub(r" at 0x[0-9a-f]+", "", text)  # the repr of an object may hold its address
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


@dataclass
class _Prompt:
    """Executions of one prompt.

    Attributes:
        held, late: number of executions that hold a slot, and number of these that are late (see :class:`FairScheduler`).
        waiting: heap of waiting executions: (arrival time plus expected seconds, sequence number, future that gets the slot).
    """

    held: int = 0
    late: int = 0
    waiting: list[tuple[float, int, "asyncio.Future[None]"]] = field(default_factory=list)

    @property
    def standing(self) -> int:
        """Number of slots that the prompt holds, minus 2 if one of its executions is late (see :class:`FairScheduler`).

        The prompt with the smallest number gets the next free slot.
        """
        return self.held - (2 if self.late else 0)


class FairScheduler:
    """Scheduler that lets ``slots`` executions run at once, and shares these slots fairly among prompts. For one event loop.

    A free slot goes to the prompt that holds the fewest slots. Among prompts with equally many slots, the execution with the
    smallest ``expected seconds - seconds waited`` gets the slot, so that none waits forever.

    An execution is late if it runs for long and still has no adaptive limit. A prompt with a late execution counts as holding two
    slots fewer, so that its other executions start sooner. Their results may give the late execution a limit.
    """

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"slots must be at least 1, found {slots!r}")
        self._free = slots
        self._prompts: defaultdict[str, _Prompt] = defaultdict(_Prompt)
        # Heap of (standing, expected end, sequence number, prompt). Entries that are out of date are dropped when they are popped.
        self._offers: list[tuple[int, float, int, str]] = []
        self._numbers = itertools.count()

    @contextlib.asynccontextmanager
    async def slot(self, prompt: str, expected: float) -> AsyncIterator[Callable[[], None]]:
        """Context manager that waits for a free slot and holds the slot within the block.

        ``expected``: seconds that the block will probably last. Yields a function that marks the execution in the block as late.
        """
        late = 0

        def is_late() -> None:
            nonlocal late
            if not late:
                late = 1
                self._prompts[prompt].late += 1
                self._give_out(prompt)

        granted = asyncio.get_running_loop().create_future()
        heapq.heappush(self._prompts[prompt].waiting, (monotonic() + expected, next(self._numbers), granted))
        self._give_out(prompt)
        try:
            await granted
            yield is_late
        finally:
            if granted.done() and not granted.cancelled():  # the caller may be cancelled before it runs with its slot
                self._free += 1
                self._prompts[prompt].held -= 1
                self._prompts[prompt].late -= late
                self._give_out(prompt)

    def _offer(self, name: str) -> None:
        """Makes the first waiting execution of the prompt ``name`` a candidate for a free slot."""
        prompt = self._prompts[name]
        while prompt.waiting and prompt.waiting[0][2].done():
            heapq.heappop(prompt.waiting)
        if prompt.waiting:
            heapq.heappush(self._offers, (prompt.standing, *prompt.waiting[0][:2], name))
        elif not prompt.held:
            del self._prompts[name]

    def _give_out(self, changed: str) -> None:
        """Gives free slots to waiting executions. ``changed``: prompt whose queue or number of slots has just changed."""
        self._offer(changed)
        while self._free and self._offers:
            standing, _, number, name = heapq.heappop(self._offers)
            prompt = self._prompts.get(name)
            if not (prompt and prompt.waiting) or (standing, number) != (prompt.standing, prompt.waiting[0][1]):
                continue
            granted = prompt.waiting[0][2]
            if not granted.done():
                granted.set_result(None)
                self._free -= 1
                prompt.held += 1
            self._offer(name)


@dataclass
class _Running:
    """A running execution of ``key`` (a prompt and test case).

    ``is_late`` is a function that marks the execution as late (see :class:`FairScheduler`). ``began`` is the start time on the
    event loop's clock. ``ended`` is the number of executions of the executor that had ended in time when ``limit`` last changed.
    """

    key: str
    limit: Limit
    is_late: Callable[[], None]
    began: float
    ended: int


class LimitedExecutor:
    """Runs at most ``slots`` executions at once under adaptive time limits; further calls wait for a slot.

    The policy (:class:`~rl_accel.reward.adaptive_timeout.AdaptiveTimeout`) gives each execution the full budget or an adaptive
    limit. A running execution with the full budget gets an adaptive limit, counted from its start, as soon as enough other
    executions of its test case were correct. A probe keeps the full budget. If the policy suspends limits, running executions have
    the full budget again. ``docs/metrics.md`` describes the counts that are added to ``anchors``.

    Args:
        anchors: longest correct executions, and counts of executions, of this process.
        slots: maximum number of executions that run at once.
        limits: resource limits of an execution. The policy replaces the wall and CPU seconds.
        maximum: full budget in seconds; None: the full budget of the policy.
        adapts: False to give each execution the full budget, for graders whose time depends on other services.
        queues: for ``adapts=False``: True if a grader may wait for a resource that other graders hold, such as one of a few
            connections. Whenever other executions have ended in time, a running execution then gets a new full budget, up to ten.
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
        self.anchors = anchors
        self.limits = limits or Limits()
        self.scheduler = FairScheduler(slots)
        self._maximum = maximum or anchors.timeout.maximum
        self._adapts, self._queues = adapts, queues and not adapts
        checks = anchors.timeout.flags.minimum / _CHECKS_PER_MINIMUM if adapts else self._maximum / _CHECKS_PER_BUDGET
        self._check_seconds = max(checks, _SHORTEST_CHECK_SECONDS)
        self._ended = self._timed_out = 0  # numbers of executions

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
            prompt: key of the prompt. Slots are shared fairly among prompts.
            case: name of the test case. Limits are learned for each pair of prompt and case.
            run: async function that executes the grader or program within the given limits, and returns the result.
            correct: function that returns True for a correct result. Limits are learned from correct executions only.
            teach: False for an evaluation, which uses the learned limits but does not change them.
        """
        key = f"{prompt}/{case}"
        timeout, loop = self.anchors.timeout, asyncio.get_running_loop()
        came = loop.time()
        async with self.scheduler.slot(prompt, timeout.expected(key, self._maximum)) as is_late:
            full = Limit(self._maximum, self._maximum, "learning")
            limit = timeout.limit(key, self._maximum) if self._adapts else full
            running = _Running(key, limit, is_late, loop.time(), self._ended)
            limits = replace(
                self.limits,
                wall=limit.wall,
                cpu=limit.cpu,
                latest=functools.partial(self._latest, running),
                check_seconds=self._check_seconds,
                full=self._maximum,
            )
            tells_about_limits = False
            try:
                result = await run(limits)
                tells_about_limits = teach and result.prove is None
            except asyncio.CancelledError:
                self.anchors.count("cancelled")
                raise
            finally:
                if limit.reason == "adaptive" and not tells_about_limits:
                    timeout.forget_limit()
        self._note_end(result)
        is_correct = correct(result)
        if result.prove and is_correct:
            result.prove()
        if not teach:
            self.anchors.count("eval_executions")
            return result
        if self._adapts:
            says_nothing = result.verdict == "timeout" or not tells_about_limits
            self.anchors.record(key, max(result.wall - result.waited, 0.0), result.cpu, is_correct, says_nothing)
        self._count(result, running.limit, is_correct, running.began - came)
        return result

    def _latest(self, running: _Running) -> tuple[float, float]:
        """Updates and returns the limits (wall and CPU seconds) of a running execution. Marks the execution if it is late."""
        # Most executions that hang begin before a limit is known: all responses of a prompt are graded at about the same time.
        timeout, reason = self.anchors.timeout, running.limit.reason
        ran = asyncio.get_running_loop().time() - running.began
        if self._adapts and reason != "probe":
            running.limit = (timeout.limit if reason == "learning" else timeout.learned)(running.key, self._maximum)
            if running.limit.reason == "learning" and ran >= timeout.flags.minimum:
                running.is_late()
        elif self._queues and running.ended != self._ended and ran < (_MOST_BUDGETS - 1) * self._maximum:
            running.ended = self._ended
            running.limit = Limit(ran + self._maximum, ran + self._maximum, "learning")
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


async def execute_program(
    executor: LimitedExecutor,
    sandbox: Sandbox,
    prompt: str,
    code: str,
    cases: Sequence[Case],
    teach: bool = True,
    early_stop: bool = False,
) -> list[ExecutionResult]:
    """Runs the program ``code`` on its test cases. Returns the results in the order of the test cases.

    With ``early_stop``, the test cases run one after another, and the first one that does not pass is the last.
    """

    async def one(number: int) -> ExecutionResult:
        return await executor.execute(
            prompt,
            str(number),
            lambda limits: sandbox.run(code, cases[number], limits),
            lambda result: result.verdict == "passed",
            teach,
        )

    if not early_stop:
        return await gather_until(map(one, range(len(cases))))
    results: list[ExecutionResult] = []
    for number in range(len(cases)):
        results.append(await one(number))
        if results[-1].verdict != "passed":
            break
    return results
