"""Limits of executions that are running: how they are passed on, who publishes them, and what the sandbox makes of them."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from rl_accel.features import RewardTimeoutFlags
from rl_accel.reward.adaptive_timeout import AdaptiveTimeout
from rl_accel.reward.anchor_store import Replica
from rl_accel.reward.execution import ExecutionResult, Limits, LimitUpdates
from rl_accel.reward.limited_executor import LimitedExecutor, execute_program
from rl_accel.reward.sandbox import Case, Sandbox

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

FLAGS = RewardTimeoutFlags(scale=1.5, slack=0.05, minimum=0.2, maximum=20.0, min_correct=2, probe_share=0.0)
HANGS = ("while True: pass", "import time\nwhile True: time.sleep(9)")
RIGHT = "print(42)"
CASE = Case("stdin", "", "42")


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


@pytest.mark.parametrize("code", HANGS)
async def test_the_sandbox_stops_at_the_limit_given_last_and_its_worker_goes_on(code, processes, closed_later):
    sandbox, updates = closed_later(Sandbox(1, "process")), LimitUpdates()
    running = asyncio.create_task(sandbox.run(code, CASE, Limits(wall=30.0, cpu=30.0, updates=updates)))
    (worker,) = await processes.executing()
    updates.publish(0.6, 20.0)
    updates.publish(0.9, 20.0)  # it may rise again
    stopped = await running
    assert (stopped.verdict, stopped.reason) == ("timeout", "wall limit")
    assert 0.9 <= stopped.wall - stopped.waited < 5.0
    for _ in range(3):
        assert (await sandbox.run(RIGHT, CASE, Limits(updates=updates))).verdict == "passed"
    assert [worker] == processes.workers()


async def test_a_limit_that_has_passed_already_stops_at_once(processes, closed_later):
    sandbox, updates = closed_later(Sandbox(1, "process")), LimitUpdates()
    running = asyncio.create_task(sandbox.run(HANGS[1], CASE, Limits(wall=30.0, updates=updates)))
    await processes.executing()
    updates.publish(0.01, 30.0)
    stopped = await running
    assert stopped.reason == "wall limit"
    assert stopped.wall < 10


class Executions:
    """Stands for the sandbox: an execution ends when its limit, as it is by then, has passed, or when it is ready."""

    def __init__(self, flags=FLAGS):
        self.executor = LimitedExecutor(Replica(AdaptiveTimeout(flags, caution=0.0)), 8)
        self.given = {}
        self.began = asyncio.Event()

    async def together(self, *executions):
        """Execute ``(name, seconds)`` or ``(name, seconds, verdict)``, all for one prompt."""
        return await asyncio.gather(
            *(
                self.executor.execute("p", "0", self._taking(*one), lambda result: result.verdict == "passed")
                for one in executions
            )
        )

    def _taking(self, name, seconds, verdict="passed"):
        async def run(limits):
            loop, changed = asyncio.get_running_loop(), asyncio.Event()
            began, given = loop.time(), self.given.setdefault(name, [limits.wall])

            def tell(wall, cpu):
                given.append(wall)
                changed.set()

            with limits.updates.subscribed(tell):
                self.began.set()
                while (left := began + min(seconds, given[-1]) - loop.time()) > 0:
                    changed.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(changed.wait(), left)
            return ExecutionResult(verdict if seconds <= given[-1] else "timeout", wall=min(seconds, given[-1]))

        return run


async def test_a_hang_that_began_with_the_full_budget_ends_soon_after_enough_others_were_correct():
    executions = Executions()
    hung, *others = await executions.together(("hangs", 60.0), ("first", 0.02), ("second", 0.03))
    assert (hung.verdict, hung.wall) == ("timeout", 0.2)
    assert [result.verdict for result in others] == ["passed", "passed"]
    assert executions.given["hangs"] == [20.0, 0.2]
    assert executions.given["first"] == [20.0]
    counts = executions.executor.replica.take_delta().counts
    assert (counts["timeouts"], counts["timeouts_full"]) == (1.0, 0.0)
    assert counts["saved_seconds"] == pytest.approx(19.8)


async def test_it_keeps_the_full_budget_while_too_few_were_correct():
    executions = Executions(replace(FLAGS, minimum=0.1, maximum=0.6))
    hung, *_ = await executions.together(("hangs", 60.0), ("right", 0.02), ("wrong", 0.02, "wrong"))
    counts = executions.executor.replica.take_delta().counts
    assert (hung.wall, executions.given["hangs"], counts["timeouts_full"]) == (0.6, [0.6], 1.0)


async def test_its_limit_rises_with_the_anchor():
    executions = Executions(replace(FLAGS, scale=6.0, slack=0.2, minimum=1.5))
    results = await executions.together(
        ("slow", 60.0), ("first", 0.02), ("second", 0.03), ("slower", 0.3), ("slower still", 0.5)
    )
    assert [result.verdict for result in results] == ["timeout", *["passed"] * 4]
    given = executions.given["slow"]
    assert given[0] == 20.0
    assert given[1:] == sorted(given[1:])
    assert results[0].wall == given[-1] == pytest.approx(6.0 * 0.5 + 0.2)


async def test_what_others_have_learned_counts_too():
    executions = Executions()
    running = asyncio.create_task(executions.together(("hangs", 60.0)))
    await executions.began.wait()
    executions.executor.replica.timeout.merge({"p/0": (0.4, 0.1, 7)})
    (hung,) = await running
    assert hung.wall == pytest.approx(0.65)
    assert executions.given["hangs"] == [20.0, pytest.approx(0.65)]


async def test_a_probe_keeps_the_full_budget():
    executions = Executions(RewardTimeoutFlags(minimum=0.1, maximum=0.8, min_correct=1, probe_share=1.0))
    results = await executions.together(("slow", 0.5), ("first", 0.02))
    assert [result.verdict for result in results] == ["passed", "passed"]
    assert executions.given["slow"] == [0.8]
    assert executions.executor.replica.take_delta().counts["probes"] == 1.0


@pytest.mark.parametrize("isolation", ["process", "auto"])
async def test_a_group_with_a_hang_takes_no_longer_than_its_limit_with_real_processes(isolation, closed_later):
    sandbox = closed_later(Sandbox(2, isolation))
    executor = LimitedExecutor(Replica(AdaptiveTimeout(replace(FLAGS, maximum=60.0), caution=0.0)), 2)
    found = await asyncio.gather(
        *(execute_program(executor, sandbox, "p", code, [CASE]) for code in (HANGS[0], *[RIGHT] * 6))
    )
    (hung,), *others = found
    assert [result.verdict for (result,) in others] == ["passed"] * 6
    assert (hung.verdict, hung.reason) == ("timeout", "wall limit")
    assert hung.wall - hung.waited < 30
