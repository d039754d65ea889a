"""verl's two rewards that run code, with each test case an execution of its own, within its own limit, and verl's scores.

``prime_code`` runs verl's own code for it in a process of ours; ``sandbox_fusion`` the remote sandbox, which enforces the limit.
"""

import asyncio
import functools
import importlib.util
import itertools
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_accel.reward.execution import ExecutionResult, Limits, gather_until
from rl_accel.reward.sandbox import Graders

DATA_SOURCES = ("codecontests", "apps", "codeforces", "taco")
"""Data sources that verl's ``default_compute_score`` scores by running code."""

SCORED_CASES = 10
"""verl scores by the share of so many cases, the first."""
_ALARM_SECONDS = 3600
"""verl's own alarm goes off so long after our limit: never."""
_PRIME_OUTPUT_BYTES = 64 << 20
"""verl lets programs print to stderr what they like."""
_threads = ThreadPoolExecutor(64, thread_name_prefix="rl_accel_fusion")
"""Requests to a remote sandbox."""

Run = Callable[[Limits], Awaitable[ExecutionResult]]
Execute = Callable[[str, Run, Callable[[ExecutionResult], bool]], Awaitable[ExecutionResult]]
"""``LimitedExecutor.execute`` for one response: takes the test case, what runs it, and whether a result is correct."""


async def score_prime_code(execute: Execute, graders: Graders, early_stop: bool, arguments: Mapping[str, Any]) -> float:
    """Score one response as ``verl.utils.reward_score.prime_code.compute_score(continuous=True)`` does.

    There the whole program must pass all cases in one go, in 6 seconds, for a score of 1; otherwise the first ten are run one by
    one (of a problem with a function to call as programs that read their input), and the score is their share. Ours is the same
    number, but for time: every case is one execution with a limit of its own, and one that runs into it is a failed case. Cases
    after the first ten, which verl runs and which cannot change its score, are left out. Cancelling this kills its executions.

    Args:
        execute: runs a test case within its limit.
        graders: where cases run; see :func:`prime_graders`.
        early_stop: leave out the cases after the first that fails. The score is then 0 or 1: the share of passed cases is not
            known, and is taken to be 0.
        arguments: of the reward function.
    """
    code = arguments["solution_str"].split("```python")[-1].split("```")[0]
    truth = arguments["ground_truth"]
    try:
        cases = truth if isinstance(truth, dict) else json.loads(truth)
        pairs = list(zip(cases["inputs"], cases["outputs"], strict=False))
        complete, name = len(cases["inputs"]) == len(pairs), cases.get("fn_name")
    except (ValueError, TypeError, KeyError, AttributeError):
        return 0.0  # as verl, which prints why

    async def passes_of_case(key: str, case: dict[str, Any]) -> list[bool]:
        async def run(limits: Limits) -> ExecutionResult:
            call = {"in_outs": case, "test": code, "timeout": math.ceil(limits.wall) + _ALARM_SECONDS}
            return await graders.call(call, replace(limits, output_bytes=_PRIME_OUTPUT_BYTES))

        return _passes_in(await execute(key, run, lambda result: _passes_in(result) == [True]))

    async def passes_of(kind: str, cases: list[dict[str, Any]], until_failure: bool) -> list[bool]:
        """verl's results of the cases in order; with ``until_failure`` as far as they are known when one fails."""
        results = await gather_until(
            (passes_of_case(f"{kind}/{number}", case) for number, case in enumerate(cases)),
            lambda passes: until_failure and not all(passes),
        )
        return list(itertools.chain.from_iterable(results))

    if name is not None:
        calls = [{**cases, "inputs": [given], "outputs": [wanted]} for given, wanted in pairs]
        if complete and all(await passes_of("call", calls, until_failure=True)):
            return 1.0
        if early_stop:
            return 0.0
    if not complete:
        return 0.0
    first = [{"inputs": [given], "outputs": [wanted]} for given, wanted in pairs[:SCORED_CASES]]
    passes = await passes_of("stdin", first, until_failure=early_stop)
    if early_stop:
        return float(all(passes))
    return sum(passes) / len(passes) if passes else float(name is None)


def _passes_in(result: ExecutionResult) -> list[bool]:
    """What verl's ``run_test`` found of each input: results, and what it says of the first that is no pass."""
    if result.verdict != "done":
        return [False]
    passes, problem = result.value
    return [passed is True and not problem for passed in passes]


def prime_graders(workers: int, isolation: str) -> Graders:
    """Return processes that run test cases by verl's own code, isolated as programs in a sandbox are.

    They load its file alone: a program under test is to have neither verl nor this package in its address space.
    """
    verl = importlib.util.find_spec("verl")
    if verl is None or verl.origin is None:
        raise ImportError("verl is not installed")
    judge = Path(verl.origin).parent / "utils" / "reward_score" / "prime_code" / "testing_util.py"
    return Graders(f"{judge}:run_test", workers, isolation=isolation)


async def score_fusion(
    execute: Execute, options: Mapping[str, Any], early_stop: bool, arguments: Mapping[str, Any]
) -> float:
    """Score one response as ``verl.utils.reward_score.sandbox_fusion.compute_score(continuous=True)`` does, case by case.

    The limit, in whole seconds, takes the place of its 10 seconds; the durations it reports teach. The score is the share of
    the first ten cases, and cases after one that does not compile fail; cases after the tenth are left out. Cancelling this stops
    waiting; the remote sandbox ends by its limits.

    Args:
        execute: runs a test case within its limit.
        options: keyword arguments of verl's: ``sandbox_fusion_url``, ``concurrent_semaphore``, ``memory_limit_mb``.
        early_stop: leave out the cases after the first that fails. The score is then 0 or 1.
        arguments: of the reward function.
    """
    from verl.utils.reward_score import sandbox_fusion

    async def ask(cases: Any, timeout: int) -> Any:
        function = functools.partial(
            sandbox_fusion.compute_score,
            options["sandbox_fusion_url"],
            options.get("concurrent_semaphore"),
            options.get("memory_limit_mb"),
            arguments["solution_str"],
            cases,
            continuous=True,
            timeout=timeout,
        )
        return await asyncio.get_running_loop().run_in_executor(_threads, function)

    async def result_of(number: int, case: dict[str, Any]) -> ExecutionResult:
        async def run(limits: Limits) -> ExecutionResult:
            began = time.monotonic()
            score, metadata = await ask(case, math.ceil(limits.wall))
            status = str(metadata[0].get("status")) if metadata else ""
            duration = metadata[0].get("duration") if metadata else None
            wall = time.monotonic() - began if duration is None else float(duration)
            stopped = status in ("timeout", "compile_timeout")
            return ExecutionResult(
                verdict="timeout" if stopped else "done", value=score == 1.0, wall=wall, reason=status
            )

        return await execute(f"fusion/{number}", run, lambda result: bool(result.value))

    cases = _single_cases(arguments["ground_truth"])
    if cases is None:  # nothing that verl would run: it says why
        score, _ = await ask(arguments["ground_truth"], 1)
        return float(score)
    if early_stop:
        for number, case in enumerate(cases):
            if not (await result_of(number, case)).value:
                return 0.0
        return float(bool(cases))
    results = await gather_until(result_of(number, case) for number, case in enumerate(cases))
    compiled = itertools.takewhile(lambda result: result.reason not in ("compile_error", "compile_timeout"), results)
    return sum(result.value for result in compiled) / len(results) if results else 0.0


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
