"""verl's two code rewards (``prime_code`` and ``sandbox_fusion``), with a separate, time-limited execution for each test case.

The scores are those of verl. ``prime_code`` runs verl's own grading code in a sandbox. ``sandbox_fusion`` calls the remote
sandbox, which enforces the time limit.
"""

import asyncio
import functools
import itertools
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import verl

from rl_accel.reward.limited_executor import ExecutionResult, Limits, gather_until
from rl_accel.reward.sandbox import Sandbox

DATA_SOURCES = ("codecontests", "apps", "codeforces", "taco")
"""Names of the data sources that verl's ``default_compute_score`` scores by running code."""

SCORED_CASES = 10
"""Number of test cases from which the pass rate is computed: the first ten, as in verl."""
_ALARM_SECONDS = 3600
"""Seconds by which the alarm in verl's grading code is later than rl-accel's time limit, so that the alarm never acts first."""
_PRIME_OUTPUT_BYTES = 64 << 20
"""Maximum size of the output of one test case in bytes. High, because verl does not limit stderr."""
_threads = ThreadPoolExecutor(64, thread_name_prefix="rl_accel_fusion")  # for requests to a remote sandbox

Run = Callable[[Limits], Awaitable[ExecutionResult]]
Execute = Callable[[str, Run, Callable[[ExecutionResult], bool]], Awaitable[ExecutionResult]]
"""``LimitedExecutor.execute`` with the prompt already given: a function of ``case``, ``run`` and ``correct``."""


async def score_prime_code(execute: Execute, judge: Sandbox, early_stop: bool, arguments: Mapping[str, Any]) -> float:
    """Scores one response as ``verl.utils.reward_score.prime_code.compute_score(continuous=True)`` does, case by case.

    The score is 1 if all cases pass, else the pass rate of the first ten cases. For this pass rate, the program gets the input of a
    case as standard input, as in verl, even if the problem names a function to call. Only the separate time limit of each case can
    make the score differ from verl's. Cancelling this call kills the running executions.

    Args:
        execute: runs a test case within the case's time limit.
        judge: sandbox that runs the cases; see :func:`prime_sandbox`.
        early_stop: True to skip the cases after the first failure. The score is then 0 or 1.
        arguments: keyword arguments of the reward function.
    """
    code = arguments["solution_str"].split("```python")[-1].split("```")[0]
    truth = arguments["ground_truth"]
    try:
        cases = truth if isinstance(truth, dict) else json.loads(truth)
        pairs = list(zip(cases["inputs"], cases["outputs"], strict=False))
        complete = len(cases["inputs"]) == len(pairs)
        name = cases.get("fn_name")
    except (ValueError, TypeError, KeyError, AttributeError):
        return 0.0  # the same score as verl, which also prints the reason

    async def passes_of(kind: str, cases: list[dict[str, Any]], until_failure: bool) -> list[bool]:
        """Runs ``cases`` and returns whether the program passed each. With ``until_failure``, stops at the first failure."""

        async def passes(number: int, case: dict[str, Any]) -> bool:
            async def run(limits: Limits) -> ExecutionResult:
                call = {"in_outs": case, "test": code, "timeout": math.ceil(limits.wall) + _ALARM_SECONDS}
                return await judge.call_judge(call, replace(limits, output_bytes=_PRIME_OUTPUT_BYTES))

            return _has_passed(await execute(f"{kind}/{number}", run, _has_passed))

        tasks = (passes(number, case) for number, case in enumerate(cases))
        return await gather_until(tasks, lambda passed: until_failure and not passed)

    if name is not None:
        calls = [{**cases, "inputs": [given], "outputs": [wanted]} for given, wanted in pairs]
        if complete and all(await passes_of("call", calls, until_failure=True)):
            return 1.0
        if early_stop:
            return 0.0
    if not complete:
        return 0.0
    first = [{"inputs": [given], "outputs": [wanted]} for given, wanted in pairs[:SCORED_CASES]]
    passed = await passes_of("stdin", first, until_failure=early_stop)
    if early_stop:
        return float(all(passed))
    return sum(passed) / len(passed) if passed else float(name is None)


def _has_passed(result: ExecutionResult) -> bool:
    """Returns whether the program passed, by the result of verl's ``run_test`` for a single input.

    The program may have forged the result. All but exactly one verdict and an empty message counts as failed.
    """
    return result.verdict == "done" and result.value == [[True], {}] and result.value[0][0] is True


def prime_sandbox(workers: int, isolation: str) -> Sandbox:
    """Returns a sandbox that runs test cases with verl's own grading code.

    It loads only the file with the grading code, so that a program under test finds neither verl nor this package in memory.
    """
    judge = Path(verl.__file__).parent / "utils" / "reward_score" / "prime_code" / "testing_util.py"
    return Sandbox(workers, isolation, f"{judge}:run_test")


async def score_fusion(
    execute: Execute, options: Mapping[str, Any], early_stop: bool, arguments: Mapping[str, Any]
) -> float:
    """Scores one response as ``verl.utils.reward_score.sandbox_fusion.compute_score(continuous=True)`` does, case by case.

    The score is the pass rate of the first ten cases, of which those after a compile error count as failed, as in verl. Each case
    is a separate request to the remote sandbox, with the case's time limit in whole seconds, rounded up. Cancelling this call does
    not stop requests in the sandbox.

    ``options`` are verl's arguments ``sandbox_fusion_url``, ``concurrent_semaphore`` and ``memory_limit_mb``. For the other
    arguments, see :func:`score_prime_code`.
    """
    ask = functools.partial(_ask_fusion, options, arguments["solution_str"])
    cases = _single_cases(arguments["ground_truth"])
    if cases is None:  # verl runs none of these cases and reports the reason
        score, _ = await ask(arguments["ground_truth"], 1)
        return float(score)

    async def result_of(number: int, case: dict[str, Any]) -> ExecutionResult:
        run = functools.partial(_run_in_fusion, ask, case)
        return await execute(f"fusion/{number}", run, lambda result: bool(result.value))

    if early_stop:
        for number, case in enumerate(cases):
            if not (await result_of(number, case)).value:
                return 0.0
        return float(bool(cases))
    results = await gather_until(result_of(number, case) for number, case in enumerate(cases))
    compiled = itertools.takewhile(lambda result: result.reason not in ("compile_error", "compile_timeout"), results)
    return sum(result.value for result in compiled) / len(results) if results else 0.0


async def _ask_fusion(options: Mapping[str, Any], code: str, cases: Any, timeout: int) -> Any:
    from verl.utils.reward_score import sandbox_fusion

    where = (options["sandbox_fusion_url"], options.get("concurrent_semaphore"), options.get("memory_limit_mb"))
    function = functools.partial(sandbox_fusion.compute_score, *where, code, cases, continuous=True, timeout=timeout)
    return await asyncio.get_running_loop().run_in_executor(_threads, function)


async def _run_in_fusion(ask: Callable[[Any, int], Awaitable[Any]], case: Any, limits: Limits) -> ExecutionResult:
    """Runs one test case in the remote sandbox.

    ``wall`` of the result is the duration that the sandbox reports, or if it reports none, the duration of the request.
    """
    began = time.monotonic()
    score, metadata = await ask(case, math.ceil(limits.wall))
    first = metadata[0] if metadata else {}
    status = str(first.get("status")) if metadata else ""
    duration = first.get("duration")
    wall = time.monotonic() - began if duration is None else float(duration)
    verdict: Literal["timeout", "done"] = "timeout" if status in ("timeout", "compile_timeout") else "done"
    return ExecutionResult(verdict=verdict, value=score == 1.0, wall=wall, reason=status)


def _single_cases(truth: Any) -> list[dict[str, Any]] | None:
    """Splits a ground truth into its first ten test cases, each in the format of a ground truth with one case.

    Returns None if verl would refuse the ground truth.
    """
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
