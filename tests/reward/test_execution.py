"""Limits of executions that are running: how they are passed on, who publishes them, and what the sandbox makes of them."""

import asyncio
import time
from dataclasses import replace

import pytest

from rl_accel.features import RewardTimeoutFlags
from rl_accel.reward.adaptive_timeout import AdaptiveTimeout
from rl_accel.reward.anchor_store import Replica
from rl_accel.reward.execution import ExecutionResult, Limits, LimitUpdates
from rl_accel.reward.limited_executor import LimitedExecutor, execute_program
from rl_accel.reward.sandbox import Case, Sandbox

FLAGS = RewardTimeoutFlags(scale=1.5, slack=0.05, minimum=0.2, maximum=20.0, min_correct=2, probe_share=0.0)
HANGS = ("while True: pass", "import time\nwhile True: time.sleep(9)")
RIGHT = "print(42)"
CASE = Case("stdin", "", "42")


def play(main):
    return asyncio.run(asyncio.wait_for(main, 60))


def test_a_subscriber_gets_the_latest_limits_and_none_twice():
    updates, told = LimitUpdates(), []
    updates.publish(5.0, 4.0)
    with updates.subscribed(lambda wall, cpu: told.append((wall, cpu))):
        updates.publish(5.0, 4.0)
        updates.publish(3.0, 4.0)
    updates.publish(1.0, 1.0)
    assert told == [(5.0, 4.0), (3.0, 4.0)]


def test_updates_are_no_limit_and_make_no_difference_to_limits():
    limits = Limits(updates=LimitUpdates())
    assert limits == Limits()
    assert "updates" not in limits.numbers()
    assert limits.numbers()["wall"] == 30.0
    with pytest.raises(ValueError, match="memory must be above 0"):
        Limits(memory=0, updates=LimitUpdates())


@pytest.mark.parametrize("code", HANGS)
def test_the_sandbox_stops_at_the_limit_given_last_and_its_worker_goes_on(code, processes):
    async def main():
        sandbox, updates = Sandbox(1, "process"), LimitUpdates()
        try:
            running = asyncio.create_task(sandbox.run(code, CASE, Limits(wall=30.0, cpu=30.0, updates=updates)))
            (worker,) = await processes.executing()
            updates.publish(0.6, 20.0)
            updates.publish(0.9, 20.0)  # it may rise again
            began = time.monotonic()
            stopped = await running
            after = [await sandbox.run(RIGHT, CASE, Limits(updates=updates)) for _ in range(3)]
            same = [worker] == processes.workers()
            return stopped, time.monotonic() - began, [result.verdict for result in after], same
        finally:
            await sandbox.close()

    stopped, seconds, after, same = play(main())
    assert (stopped.verdict, stopped.reason) == ("timeout", "wall limit")
    assert 0.9 <= stopped.wall - stopped.waited < 5.0
    assert seconds < 10
    assert after == ["passed"] * 3
    assert same


def test_a_limit_that_has_passed_already_stops_at_once(processes):
    async def main():
        sandbox, updates = Sandbox(1, "process"), LimitUpdates()
        try:
            running = asyncio.create_task(sandbox.run(HANGS[1], CASE, Limits(wall=30.0, updates=updates)))
            await processes.executing()
            updates.publish(0.01, 30.0)
            return await running
        finally:
            await sandbox.close()

    stopped = play(main())
    assert stopped.reason == "wall limit"
    assert stopped.wall < 10


class Executions:
    """Stands for the sandbox: an execution ends when its limit, as it is by then, has passed, or when it is ready."""

    def __init__(self):
        self.given = {}
        self.began = asyncio.Event()

    def taking(self, name, seconds, verdict="passed"):
        async def run(limits):
            began, loop = asyncio.get_running_loop().time(), asyncio.get_running_loop()
            allowed = [limits.wall]
            given = self.given.setdefault(name, [limits.wall])

            def tell(wall, cpu):
                allowed[0] = wall
                given.append(wall)

            with limits.updates.subscribed(tell):
                self.began.set()
                while loop.time() - began < min(seconds, allowed[0]):
                    await asyncio.sleep(0.005)
            return ExecutionResult(verdict if seconds <= allowed[0] else "timeout", wall=min(seconds, allowed[0]))

        return run


def made(flags=FLAGS, slots=8):
    executor = LimitedExecutor(Replica(AdaptiveTimeout(flags, caution=0.0)), slots)
    return executor


async def together(executor, *executions, prompt="p"):
    return await asyncio.gather(
        *(executor.execute(prompt, "0", run, lambda result: result.verdict == "passed") for run in executions)
    )


def test_a_hang_that_began_with_the_full_budget_ends_soon_after_enough_others_were_correct():
    async def main():
        executor, executions = made(), Executions()
        results = await together(
            executor,
            executions.taking("hangs", 60.0),
            executions.taking("first", 0.02),
            executions.taking("second", 0.03),
        )
        return results, executions.given, executor.replica.take_delta().counts

    (hung, *others), given, counts = play(main())
    assert hung.verdict == "timeout"
    assert hung.wall == 0.2
    assert [result.verdict for result in others] == ["passed", "passed"]
    assert given["hangs"] == [20.0, 0.2]
    assert given["first"] == [20.0]
    assert (counts["timeouts"], counts["timeouts_full"]) == (1.0, 0.0)
    assert counts["saved_seconds"] == pytest.approx(19.8)


def test_it_keeps_the_full_budget_while_too_few_were_correct():
    async def main():
        executor, executions = (
            made(RewardTimeoutFlags(minimum=0.1, maximum=0.6, min_correct=2, probe_share=0.0)),
            Executions(),
        )
        results = await together(
            executor,
            executions.taking("hangs", 60.0),
            executions.taking("right", 0.02),
            executions.taking("wrong", 0.02, "wrong"),
        )
        return results[0], executions.given["hangs"], executor.replica.take_delta().counts

    hung, given, counts = play(main())
    assert (hung.wall, given, counts["timeouts_full"]) == (0.6, [0.6], 1.0)


def test_its_limit_rises_with_the_anchor():
    async def main():
        executor, executions = made(replace(FLAGS, scale=6.0, slack=0.2, minimum=1.5)), Executions()
        return await together(
            executor,
            executions.taking("slow", 60.0),
            executions.taking("first", 0.02),
            executions.taking("second", 0.03),
            executions.taking("slower", 0.3),
            executions.taking("slower still", 0.5),
        ), executions.given["slow"]

    results, given = play(main())
    assert [result.verdict for result in results] == ["timeout", *["passed"] * 4]
    assert given[0] == 20.0
    assert given[1:] == sorted(given[1:])
    assert results[0].wall == given[-1] == pytest.approx(6.0 * 0.5 + 0.2)


def test_what_others_have_learned_counts_too():
    async def main():
        executor, executions = made(), Executions()
        running = asyncio.create_task(together(executor, executions.taking("hangs", 60.0)))
        await executions.began.wait()
        executor.replica.timeout.merge({"p/0": (0.4, 0.1, 7)})
        ((hung,), given) = await running, executions.given["hangs"]
        return hung.wall, given

    assert play(main()) == (pytest.approx(0.65), [20.0, pytest.approx(0.65)])


def test_a_probe_keeps_the_full_budget():
    async def main():
        flags = RewardTimeoutFlags(minimum=0.1, maximum=0.8, min_correct=1, probe_share=1.0)
        executor, executions = made(flags), Executions()
        results = await together(executor, executions.taking("slow", 0.5), executions.taking("first", 0.02))
        return [r.verdict for r in results], executions.given["slow"], executor.replica.take_delta().counts["probes"]

    assert play(main()) == (["passed", "passed"], [0.8], 1.0)


@pytest.mark.parametrize("isolation", ["process", "auto"])
def test_a_group_with_a_hang_takes_no_longer_than_its_limit_with_real_processes(isolation):
    async def main():
        flags = replace(FLAGS, maximum=60.0)
        sandbox, executor = Sandbox(2, isolation), made(flags, slots=2)
        try:
            codes = [HANGS[0], *[RIGHT] * 6]
            found = await asyncio.gather(*(execute_program(executor, sandbox, "p", code, [CASE]) for code in codes))
            return [result for (result,) in found]
        finally:
            await sandbox.close()

    hung, *others = play(main())
    assert [result.verdict for result in others] == ["passed"] * 6
    assert (hung.verdict, hung.reason) == ("timeout", "wall limit")
    assert hung.wall - hung.waited < 30
