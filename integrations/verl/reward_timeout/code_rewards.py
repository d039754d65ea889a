"""verl's two rewards that run code, with each test case an execution of its own, within its own limit, and verl's scores.

``prime_code`` runs verl's own code for it in a process of ours; ``sandbox_fusion`` the remote sandbox, which enforces the limit.
"""

import asyncio
import importlib.util
import itertools
import json
import math
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_accel.reward.execution import ExecutionResult, Limits, gather_until
from rl_accel.reward.limited_executor import LimitedExecutor
from rl_accel.reward.sandbox import Graders

DATA_SOURCES = ("codecontests", "apps", "codeforces", "taco")
"""Data sources that verl's ``default_compute_score`` scores by running code."""

SCORED_CASES = 10
"""verl scores by the share of so many cases, the first."""
_ALARM_SECONDS = 3600
"""verl's own alarm goes off so long after our limit: never."""
_PRIME_OUTPUT_BYTES = 64 << 20
"""verl lets programs print to stderr what they like."""
_FUSION_THREADS = 64
"""Requests to a remote sandbox at once."""


class PrimeCode:
    """Scores as ``verl.utils.reward_score.prime_code.compute_score(continuous=True)`` does.

    There the whole program must pass all cases in one go, in 6 seconds, for a score of 1; otherwise the first ten are run one by
    one (of a problem with a function to call as programs that read their input), and the score is their share. Ours is the same
    number, but for time: every case is one execution with a limit of its own, and one that runs into it is a failed case. Cases
    after the first ten, which verl runs and which cannot change its score, are left out.

    Args:
        executor: turns and limits.
        graders: where cases run; see :func:`prime_graders`.
        early_stop: leave out the cases after the first that fails. The score is then 0 or 1: the share of passed cases is not
            known, and is taken to be 0.
    """

    def __init__(self, executor: LimitedExecutor, graders: Graders, early_stop: bool) -> None:
        self._executor = executor
        self._graders = graders
        self._early_stop = early_stop

    async def score(self, prompt: str, teach: bool, arguments: Mapping[str, Any]) -> float:
        """Score one response. Cancelling this kills its executions."""
        code = arguments["solution_str"].split("```python")[-1].split("```")[0]
        truth = arguments["ground_truth"]
        try:
            cases = truth if isinstance(truth, dict) else json.loads(truth)
            pairs = list(zip(cases["inputs"], cases["outputs"], strict=False))
            complete, name = len(cases["inputs"]) == len(pairs), cases.get("fn_name")
        except (ValueError, TypeError, KeyError, AttributeError):
            return 0.0  # as verl, which prints why

        async def passes_of(kind: str, cases: list[dict[str, Any]], until_failure: bool) -> list[bool]:
            """verl's results of the cases in order; with ``until_failure`` as far as they are known when one fails."""
            results = await gather_until(
                (self._run(prompt, teach, f"{kind}/{number}", code, case) for number, case in enumerate(cases)),
                lambda passes: until_failure and not all(passes),
            )
            return list(itertools.chain.from_iterable(results))

        if name is not None:
            calls = [{**cases, "inputs": [given], "outputs": [wanted]} for given, wanted in pairs]
            if complete and all(await passes_of("call", calls, until_failure=True)):
                return 1.0
            if self._early_stop:
                return 0.0
        if not complete:
            return 0.0
        first = [{"inputs": [given], "outputs": [wanted]} for given, wanted in pairs[:SCORED_CASES]]
        passes = await passes_of("stdin", first, until_failure=self._early_stop)
        if self._early_stop:
            return float(all(passes))
        return sum(passes) / len(passes) if passes else float(name is None)

    async def _run(self, prompt: str, teach: bool, key: str, code: str, case: dict[str, Any]) -> list[bool]:
        async def run(limits: Limits) -> ExecutionResult:
            arguments = {"in_outs": case, "test": code, "timeout": math.ceil(limits.wall) + _ALARM_SECONDS}
            return await self._graders.call(arguments, replace(limits, output_bytes=_PRIME_OUTPUT_BYTES))

        def passes_in(result: ExecutionResult) -> list[bool]:
            if result.verdict != "done":
                return [False]
            passes, problem = result.value
            return [passed is True and not problem for passed in passes]

        result = await self._executor.execute(prompt, key, run, lambda result: passes_in(result) == [True], teach)
        return passes_in(result)


def prime_graders(workers: int, isolation: str) -> Graders:
    """Return processes that run test cases for :class:`PrimeCode` by verl's own code, isolated as programs in a sandbox are.

    They load its file alone: a program under test is to have neither verl nor this package in its address space.
    """
    verl = importlib.util.find_spec("verl")
    if verl is None or verl.origin is None:
        raise ImportError("verl is not installed")
    judge = Path(verl.origin).parent / "utils" / "reward_score" / "prime_code" / "testing_util.py"
    return Graders(f"{judge}:run_test", workers, isolation=isolation)


class Fusion:
    """Scores as ``verl.utils.reward_score.sandbox_fusion.compute_score(continuous=True)`` does, by calling it for each case.

    The limit, in whole seconds, takes the place of its 10 seconds; the durations it reports teach. The score is the share of
    the first ten cases, and cases after one that does not compile fail; cases after the tenth are left out.

    Args:
        executor: limits, and as many turns as requests may be under way.
        options: keyword arguments of verl's: ``sandbox_fusion_url``, ``concurrent_semaphore``, ``memory_limit_mb``.
        early_stop: leave out the cases after the first that fails. The score is then 0 or 1.
    """

    def __init__(self, executor: LimitedExecutor, options: Mapping[str, Any], early_stop: bool) -> None:
        self._executor = executor
        self._options = options
        self._early_stop = early_stop
        self._threads = ThreadPoolExecutor(_FUSION_THREADS, thread_name_prefix="rl_accel_fusion")

    async def score(self, prompt: str, teach: bool, arguments: Mapping[str, Any]) -> float:
        """Score one response. Cancelling this stops waiting; the remote sandbox ends by its limits."""
        solution, truth = arguments["solution_str"], arguments["ground_truth"]
        cases = _single_cases(truth)
        if cases is None:  # nothing that verl would run: it says why
            score, _ = await self._ask(solution, truth, 1)
            return float(score)
        if self._early_stop:
            for number, case in enumerate(cases):
                if not (await self._run(prompt, teach, number, solution, case)).value:
                    return 0.0
            return float(bool(cases))
        results = await gather_until(
            self._run(prompt, teach, number, solution, case) for number, case in enumerate(cases)
        )
        compiled = itertools.takewhile(
            lambda result: result.reason not in ("compile_error", "compile_timeout"), results
        )
        return sum(result.value for result in compiled) / len(results) if results else 0.0

    async def _run(self, prompt: str, teach: bool, number: int, solution: str, case: dict[str, Any]) -> ExecutionResult:
        async def run(limits: Limits) -> ExecutionResult:
            began = time.monotonic()
            score, metadata = await self._ask(solution, case, math.ceil(limits.wall))
            status = str(metadata[0].get("status")) if metadata else ""
            duration = metadata[0].get("duration") if metadata else None
            wall = time.monotonic() - began if duration is None else float(duration)
            stopped = status in ("timeout", "compile_timeout")
            return ExecutionResult(
                verdict="timeout" if stopped else "done", value=score == 1.0, wall=wall, reason=status
            )

        return await self._executor.execute(prompt, f"fusion/{number}", run, lambda result: result.value, teach)

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


def _single_cases(truth: Any) -> list[dict[str, Any]] | None:
    """Return the cases that count, each in the form of the whole; None if verl would not run them."""
    try:
        whole = dict(truth) if isinstance(truth, dict) else json.loads(truth)
        if isinstance(whole.get("assert_case"), list):
            whole.setdefault("inputs", ["" for _ in whole["assert_case"]])
            whole.setdefault("outputs", [None for _ in whole["assert_case"]])
        columns = [name for name in ("inputs", "outputs", "assert_case") if name in whole]
        lengths = {len(whole[name]) for name in columns}
        if not {"inputs", "outputs"} <= set(columns) or len(lengths) != 1:
            return None
        count = min(lengths.pop(), SCORED_CASES)
        return [{**whole, **{name: [whole[name][number]] for name in columns}} for number in range(count)]
    except (ValueError, TypeError, AttributeError):
        return None
