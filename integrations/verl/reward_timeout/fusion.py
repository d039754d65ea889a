"""verl's ``sandbox_fusion`` reward with each test case an execution of its own, whose limit the remote sandbox enforces."""

import asyncio
import itertools
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rl_accel.integrations.verl.reward_timeout.functions import AwaitedResult, Call
from rl_accel.integrations.verl.reward_timeout.outcome import Outcome
from rl_accel.integrations.verl.reward_timeout.prime_code import SCORED_CASES
from rl_accel.reward.limited_executor import LimitedExecutor

_COLUMNS = ("inputs", "outputs", "assert_case")
_TIMED_OUT = ("timeout", "compile_timeout")
_NOT_COMPILED = ("compile_error", "compile_timeout")


class Fusion:
    """Scores as ``verl.utils.reward_score.sandbox_fusion.compute_score(continuous=True)`` does, by calling it for each case.

    The limit, in whole seconds, takes the place of its 10 seconds; the durations it reports teach. The score is the share of
    the first ten cases, and cases after one that does not compile fail; cases after the tenth are left out.

    Args:
        executor: limits, and as many turns as requests may be under way.
        options: keyword arguments of verl's: ``sandbox_fusion_url``, ``concurrent_semaphore``, ``memory_limit_mb``.
        early_stop: leave out the cases after the first that fails. The score is then 0 or 1.
        threads: requests at once.
    """

    def __init__(self, executor: LimitedExecutor, options: dict[str, Any], early_stop: bool, threads: int) -> None:
        self._executor = executor
        self._options = options
        self._early_stop = early_stop
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="rl_accel_fusion")

    async def run(self, call: Call, arguments: dict[str, Any]) -> Outcome:
        """Score one response. Cancelling this stops waiting; the remote sandbox ends by its limits."""
        cases = _split(arguments["ground_truth"])
        if cases is None:  # nothing that verl would run: it says why
            score, _ = await self._ask(arguments["solution_str"], arguments["ground_truth"], 1)
            return Outcome(float(score))
        if self._early_stop:
            for number, case in enumerate(cases):
                if not (await self._one(call, arguments["solution_str"], number, case)).value:
                    return Outcome(0.0)
            return Outcome(float(bool(cases)))
        tasks = [
            asyncio.ensure_future(self._one(call, arguments["solution_str"], number, case))
            for number, case in enumerate(cases)
        ]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        compiled = list(itertools.takewhile(lambda result: result.reason not in _NOT_COMPILED, results))
        return Outcome(sum(result.value for result in compiled) / len(results) if results else 0.0)

    async def _one(self, call: Call, solution: str, number: int, case: dict[str, Any]) -> AwaitedResult:
        async def run(limits: Any) -> AwaitedResult:
            began = time.monotonic()
            score, metadata = await self._ask(solution, case, math.ceil(limits.wall))
            status = str(metadata[0].get("status")) if metadata else ""
            wall = metadata[0].get("duration") if metadata else None
            wall = time.monotonic() - began if wall is None else float(wall)
            return AwaitedResult("timeout" if status in _TIMED_OUT else "done", score == 1.0, wall, reason=status)

        return await self._executor.execute(call.prompt, f"fusion/{number}", run, lambda found: found.value, call.teach)

    async def _ask(self, solution: str, cases: Any, timeout: int) -> Any:
        from verl.utils.reward_score import sandbox_fusion

        def ask() -> Any:
            return sandbox_fusion.compute_score(
                self._options["sandbox_fusion_url"],
                self._options.get("concurrent_semaphore"),
                self._options.get("memory_limit_mb"),
                solution,
                cases,
                continuous=True,
                timeout=timeout,
            )

        return await asyncio.get_running_loop().run_in_executor(self._threads, ask)


def _split(truth: Any) -> list[dict[str, Any]] | None:
    """Return the cases that count, each in the form of the whole; None if verl would not run them."""
    try:
        whole = dict(truth) if isinstance(truth, dict) else json.loads(truth)
        if isinstance(whole.get("assert_case"), list):
            whole.setdefault("inputs", ["" for _ in whole["assert_case"]])
            whole.setdefault("outputs", [None for _ in whole["assert_case"]])
        columns = [name for name in _COLUMNS if name in whole]
        lengths = {len(whole[name]) for name in columns}
        if not {"inputs", "outputs"} <= set(columns) or len(lengths) != 1:
            return None
        count = min(lengths.pop(), SCORED_CASES)
        return [{**whole, **{name: [whole[name][number]] for name in columns}} for number in range(count)]
    except (ValueError, TypeError, AttributeError):
        return None
