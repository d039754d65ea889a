"""Whose turn it is, what limit an execution gets, and what it teaches; with executions that only say what they took."""

import asyncio

import pytest

from rl_accel.features import RewardTimeoutFlags
from rl_accel.reward.adaptive_timeout import AdaptiveTimeout
from rl_accel.reward.anchor_store import Replica
from rl_accel.reward.execution import ExecutionResult
from rl_accel.reward.limited_executor import LimitedExecutor, execute_program
from rl_accel.reward.sandbox import Case

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

FLAGS = RewardTimeoutFlags(scale=1.5, slack=0.5, minimum=2.0, maximum=30.0, min_correct=2, probe_share=0.0)


def made(slots=4):
    return LimitedExecutor(Replica(AdaptiveTimeout(FLAGS, caution=0.0)), slots)


def passed(result):
    return result.verdict == "passed"


async def execute(executor, verdict, prompt="p", case="0", teach=True, **took):
    """Execute what has that verdict and took that long; return the wall and processor seconds that it was given."""
    given = []

    async def run(limits):
        given.append((limits.wall, limits.cpu))
        return ExecutionResult(verdict, **took)

    await executor.execute(prompt, case, run, passed, teach=teach)
    return given[0]


async def test_limits_adapt_once_enough_correct_results_of_the_prompt_and_test_case_are_known():
    executor = made()
    seen = [await execute(executor, "passed", wall=wall, cpu=wall / 10) for wall in (4.0, 6.0, 1.0)]
    assert seen == [(30.0, 30.0), (30.0, 30.0), (9.5, 9.5)]
    assert executor.replica.take_delta().counts["correct"] == 3.0
    assert await execute(executor, "wrong", "p", "1") == (30.0, 30.0)
    assert await execute(executor, "wrong", "q", "0") == (30.0, 30.0)


@pytest.mark.parametrize(
    ("verdict", "anchor"),
    [
        ("passed", (3.5, 3.0, 1)),
        *((other, (0.0, 0.0, 0)) for other in ("wrong", "error", "timeout", "memory", "killed")),
    ],
)
async def test_only_correct_results_teach_and_only_time_with_a_processor(verdict, anchor):
    executor = made()
    await execute(executor, verdict, wall=9.0, cpu=3.0, waited=5.5)
    assert executor.replica.timeout.get("p/0") == anchor


async def test_an_evaluation_uses_anchors_and_leaves_them():
    executor = made()
    for _ in range(2):
        await execute(executor, "passed", wall=4.0)
    executor.replica.take_delta()
    assert await execute(executor, "passed", wall=6.0, teach=False) == (6.5, 6.5)
    assert executor.replica.timeout.get("p/0") == (4.0, 0.0, 2)
    assert executor.replica.take_delta().counts == {"eval_executions": 1.0}


async def test_what_is_counted():
    executor = made()
    for verdict, prompt, wall in (
        ("passed", "p", 1.0),
        ("passed", "p", 1.0),
        ("timeout", "p", 2.0),
        ("timeout", "q", 30.0),
        ("memory", "q", 1.0),
    ):
        await execute(executor, verdict, prompt, wall=wall)
    counts = dict(executor.replica.take_delta().counts)
    del counts["waited_seconds"]
    assert counts == {
        "executions": 5.0,
        "correct": 2.0,
        "timeouts": 2.0,
        "timeouts_full": 1.0,
        "killed": 1.0,
        "probes": 0.0,
        "seconds": 35.0,
        "saved_seconds": 28.0,
    }


async def test_cancelling_the_caller_cancels_the_execution_and_frees_its_slot():
    executor, stopped, began = made(slots=1), [], asyncio.Event()

    async def endless(limits):
        began.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            stopped.append(True)
            raise

    task = asyncio.create_task(executor.execute("p", "0", endless, passed))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stopped == [True]
    await execute(executor, "passed")
    counts = executor.replica.take_delta().counts
    assert (counts["cancelled"], counts["executions"]) == (1.0, 1.0)


class Programs:
    """Stands for the sandbox: the verdict of a case is its text."""

    def __init__(self):
        self.ran = []

    async def run(self, code, case, limits):
        self.ran.append(case.given)
        await asyncio.sleep(0)
        if case.given == "breaks":
            raise RuntimeError("no worker")
        return ExecutionResult(case.given)


@pytest.mark.parametrize(("early_stop", "judged"), [(False, 4), (True, 2)])
async def test_test_cases_of_a_program_are_judged_in_order_with_early_stop_until_one_fails(early_stop, judged):
    verdicts = ["passed", "timeout", "passed", "wrong"]
    programs, cases = Programs(), [Case("stdin", verdict) for verdict in verdicts]
    results = await execute_program(made(), programs, "p", "", cases, early_stop=early_stop)
    assert [result.verdict for result in results] == programs.ran == verdicts[:judged]


async def test_a_sandbox_that_fails_fails_the_program_and_stops_its_other_cases():
    executor, cases = made(slots=1), [Case("stdin", verdict) for verdict in ("breaks", *["passed"] * 50)]
    with pytest.raises(RuntimeError, match="no worker"):
        await execute_program(executor, Programs(), "p", "", cases)
    await execute(executor, "passed", "q")  # its slot is free
    assert executor.replica.take_delta().counts["executions"] < 50
