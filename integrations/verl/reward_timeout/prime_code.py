"""verl's ``prime_code`` reward with each test case an execution of its own, judged by verl's own code, within its own limit."""

import asyncio
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

from rl_accel.integrations.verl.reward_timeout.functions import Call
from rl_accel.integrations.verl.reward_timeout.outcome import Outcome
from rl_accel.reward.graders import GradeResult, Graders
from rl_accel.reward.limited_executor import LimitedExecutor

DATA_SOURCES = ("codecontests", "apps", "codeforces", "taco")
"""Data sources that verl's ``default_compute_score`` scores by running code."""

SCORED_CASES = 10
"""verl scores by the share of so many cases, the first."""
_ALARM_SECONDS = 3600
"""verl's own alarm goes off so long after our limit: never."""


def graders(workers: int) -> Graders:
    """Return processes that run test cases."""
    package = importlib.util.find_spec("verl")
    assert package is not None
    assert package.origin is not None
    judge = Path(package.origin).parent / "utils" / "reward_score" / "prime_code" / "testing_util.py"
    target = f"{Path(__file__).with_name('prime_case.py')}:load"
    return Graders(target, workers, arguments={"path": str(judge)}, limited=True)


class PrimeCode:
    """Scores as ``verl.utils.reward_score.prime_code.compute_score(continuous=True)`` does.

    There the whole program must pass all cases in one go, in 6 seconds, for a score of 1; otherwise the first ten are run one by
    one (of a problem with a function to call as programs that read their input), and the score is their share. Ours is the same
    number, but for time: every case is one execution with a limit of its own, and one that runs into it is a failed case. Cases
    after the first ten, which verl runs and which cannot change its score, are left out.

    Args:
        executor: slots and limits.
        graders: where cases run; see :func:`graders`.
        early_stop: leave out the cases after the first that fails. The score is then 0 or 1: the share of passed cases is not
            known, and is taken to be 0.
    """

    def __init__(self, executor: LimitedExecutor, graders: Graders, early_stop: bool) -> None:
        self._executor = executor
        self._graders = graders
        self._early_stop = early_stop

    async def run(self, call: Call, arguments: dict[str, Any]) -> Outcome:
        """Score one response. Cancelling this kills its executions."""
        code = arguments["solution_str"].split("```python")[-1].split("```")[0]
        truth = arguments["ground_truth"]
        try:
            cases = truth if isinstance(truth, dict) else json.loads(truth)
            pairs = list(zip(cases["inputs"], cases["outputs"], strict=False))
            complete, name = len(cases["inputs"]) == len(pairs), cases.get("fn_name")
        except (ValueError, TypeError, KeyError, AttributeError):
            return Outcome(0.0)  # as verl, which prints why
        if name is not None:
            calls = [{**cases, "inputs": [given], "outputs": [wanted]} for given, wanted in pairs]
            if complete and all(await self._run_all(call, "call", code, calls, until_failure=True)):
                return Outcome(1.0)
            if self._early_stop:
                return Outcome(0.0)
        if not complete:
            return Outcome(0.0)
        first = [{"inputs": [given], "outputs": [wanted]} for given, wanted in pairs[:SCORED_CASES]]
        passed = await self._run_all(call, "stdin", code, first, until_failure=self._early_stop)
        if self._early_stop:
            return Outcome(float(all(passed)))
        return Outcome(sum(passed) / len(passed) if passed else float(name is None))

    async def _run_all(
        self, call: Call, kind: str, code: str, cases: list[dict[str, Any]], until_failure: bool
    ) -> list[bool]:
        """Return verl's results of the cases in order; with ``until_failure`` only [False] once one fails."""

        async def one(number: int) -> list[bool]:
            def run(limits: Any) -> Any:
                alarm = math.ceil(limits.wall) + _ALARM_SECONDS
                return self._graders.call({"case": cases[number], "code": code, "timeout": alarm}, limits)

            result = await self._executor.execute(call.prompt, f"{kind}/{number}", run, _passed, call.teach)
            return result.value if result.verdict == "done" else [False]

        tasks = [asyncio.ensure_future(one(number)) for number in range(len(cases))]
        try:
            for next_one in asyncio.as_completed(tasks) if until_failure else ():
                if not all(await next_one):
                    return [False]
            return [passed for found in await asyncio.gather(*tasks) for passed in found]
        finally:
            for task in tasks:
                task.cancel()


def _passed(result: GradeResult) -> bool:
    return result.verdict == "done" and result.value == [True]
