"""Whose turn it is, what limit an execution gets, and what it teaches; with executions that only say what they took."""

import asyncio

import pytest

from rl_accel.features import RewardTimeoutFlags
from rl_accel.reward.adaptive_timeout import AdaptiveTimeout
from rl_accel.reward.anchor_store import Replica
from rl_accel.reward.execution import ExecutionResult
from rl_accel.reward.limited_executor import LimitedExecutor, execute_program
from rl_accel.reward.sandbox import Case

FLAGS = RewardTimeoutFlags(scale=1.5, slack=0.5, minimum=2.0, maximum=30.0, min_correct=2, probe_share=0.0)


def play(main):
    return asyncio.run(asyncio.wait_for(main, 20))


def made(slots=4, flags=FLAGS):
    executor = LimitedExecutor(Replica(AdaptiveTimeout(flags, caution=0.0)), slots)
    return executor


def taking(result, seen=None):
    async def run(limits):
        if seen is not None:
            seen.append((limits.wall, limits.cpu))
        return result

    return run


def passed(result):
    return result.verdict == "passed"


def test_limits_adapt_once_enough_correct_results_are_known():
    async def main():
        executor, seen = made(), []
        for wall in (4.0, 6.0, 1.0):
            await executor.execute("p", "0", taking(ExecutionResult("passed", wall=wall, cpu=wall / 10), seen), passed)
        return executor, seen

    executor, seen = play(main())
    assert seen == [(30.0, 30.0), (30.0, 30.0), (9.5, 9.5)]
    assert executor.replica.take_delta().counts["correct"] == 3.0


def test_other_test_cases_and_prompts_have_limits_of_their_own():
    async def main():
        executor, seen = made(), []
        for _ in range(2):
            await executor.execute("p", "0", taking(ExecutionResult("passed", wall=1.0)), passed)
        for prompt, case in (("p", "1"), ("q", "0"), ("p", "0")):
            await executor.execute(prompt, case, taking(ExecutionResult("wrong"), seen), passed)
        return seen

    assert [wall for wall, _ in play(main())] == [30.0, 30.0, 2.0]


def test_time_without_a_processor_does_not_teach():
    async def main():
        executor = made()
        await executor.execute("p", "0", taking(ExecutionResult("passed", wall=9.0, cpu=3.0, waited=5.5)), passed)
        return executor.replica.timeout.get("p/0")

    assert play(main()) == (3.5, 3.0, 1)


@pytest.mark.parametrize("verdict", ["wrong", "error", "timeout", "memory", "killed"])
def test_only_correct_results_teach(verdict):
    async def main():
        executor = made()
        await executor.execute("p", "0", taking(ExecutionResult(verdict, wall=1.0, cpu=1.0)), passed)
        return executor.replica.timeout.get("p/0")

    assert play(main()) == (0.0, 0.0, 0)


def test_an_evaluation_uses_anchors_and_leaves_them():
    async def main():
        executor, seen = made(), []
        for _ in range(2):
            await executor.execute("p", "0", taking(ExecutionResult("passed", wall=4.0)), passed)
        executor.replica.take_delta()
        await executor.execute("p", "0", taking(ExecutionResult("passed", wall=6.0), seen), passed, teach=False)
        return executor.replica, seen

    replica, seen = play(main())
    assert seen == [(6.5, 6.5)]
    assert replica.timeout.get("p/0") == (4.0, 0.0, 2)
    assert replica.take_delta().counts == {"eval_executions": 1.0}


def test_what_is_counted():
    async def main():
        executor = made()
        for _ in range(2):
            await executor.execute("p", "0", taking(ExecutionResult("passed", wall=1.0)), passed)
        await executor.execute("p", "0", taking(ExecutionResult("timeout", wall=2.0)), passed)
        await executor.execute("q", "0", taking(ExecutionResult("timeout", wall=30.0)), passed)
        await executor.execute("q", "0", taking(ExecutionResult("memory", wall=1.0)), passed)
        counts = executor.replica.take_delta().counts
        return {name: counts[name] for name in counts if name != "waited_seconds"}

    assert play(main()) == {
        "executions": 5.0,
        "correct": 2.0,
        "timeouts": 2.0,
        "timeouts_full": 1.0,
        "killed": 1.0,
        "probes": 0.0,
        "seconds": 35.0,
        "saved_seconds": 28.0,
    }


def test_cancelling_the_caller_cancels_the_execution_and_frees_its_slot():
    async def main():
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
        await executor.execute("p", "0", taking(ExecutionResult("passed")), passed)
        return stopped, executor.replica.take_delta().counts

    stopped, counts = play(main())
    assert stopped == [True]
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


def cases(*verdicts):
    return [Case("stdin", verdict) for verdict in verdicts]


def test_all_test_cases_of_a_program_are_judged_in_order():
    async def main():
        return await execute_program(made(), Programs(), "p", "", cases("passed", "wrong", "passed"))

    assert [result.verdict for result in play(main())] == ["passed", "wrong", "passed"]


def test_early_stop_leaves_out_what_comes_after_a_failure():
    async def main():
        programs = Programs()
        results = await execute_program(
            made(), programs, "p", "", cases("passed", "timeout", "passed", "wrong"), early_stop=True
        )
        return [result.verdict for result in results], programs.ran

    assert play(main()) == (["passed", "timeout"], ["passed", "timeout"])


def test_a_sandbox_that_fails_fails_the_program_and_stops_its_other_cases():
    async def main():
        executor = made(slots=1)
        with pytest.raises(RuntimeError, match="no worker"):
            await execute_program(executor, Programs(), "p", "", cases("breaks", *["passed"] * 50))
        await executor.execute("q", "0", taking(ExecutionResult("passed")), passed)  # its slot is free
        return executor.replica.take_delta().counts["executions"]

    assert play(main()) < 50
