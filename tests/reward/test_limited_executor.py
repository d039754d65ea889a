"""Tests the limits of executions, also while they run, and what is learned. Most executions here only report durations."""

import asyncio
from dataclasses import replace

import pytest

from rl_accel.features import RewardTimeoutFlags
from rl_accel.reward.adaptive_timeout import AdaptiveTimeout, LocalAnchors
from rl_accel.reward.limited_executor import ExecutionResult, LimitedExecutor, Limits, prompt_key, run_within
from rl_accel.reward.sandbox import Case, Sandbox, execute_program

pytestmark = pytest.mark.timeout(120)

FLAGS = RewardTimeoutFlags(scale=1.5, slack=0.5, minimum=2.0, maximum=30.0, min_correct=2, probe_share=0.0)
FAILURES = ("wrong", "error", "timeout", "memory", "killed")


def made(slots=4):
    return LimitedExecutor(LocalAnchors(AdaptiveTimeout(FLAGS, caution=0.0)), slots)


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


async def test_limits_adapt_once_enough_correct_results_of_the_prompt_and_test_case_are_known_and_not_by_evaluations():
    executor = made()
    seen = [await execute(executor, "passed", wall=wall, cpu=wall / 10) for wall in (4.0, 6.0, 1.0)]
    assert seen == [(30.0, 30.0), (30.0, 30.0), (9.5, 9.5)]
    assert await execute(executor, "passed", wall=9.0, teach=False) == (9.5, 9.5)
    assert executor.anchors.timeout.get("p/0") == (6.0, 0.6, 3)
    totals = executor.anchors.totals
    assert (totals["correct"], totals["executions"], totals["eval_executions"]) == (3.0, 3.0, 1.0)
    assert await execute(executor, "wrong", "p", "1") == (30.0, 30.0)
    assert await execute(executor, "wrong", "q", "0") == (30.0, 30.0)


@pytest.mark.parametrize(("verdict", "anchor"), [("passed", (9.0, 3.0, 1)), *((v, (0.0, 0.0, 0)) for v in FAILURES)])
async def test_only_correct_results_teach(verdict, anchor):
    executor = made()
    await execute(executor, verdict, wall=9.0, cpu=3.0)
    assert executor.anchors.timeout.get("p/0") == anchor


async def test_what_is_counted():
    executor = made()
    for verdict, wall in (("passed", 1.0), ("passed", 1.0), ("timeout", 2.0)):
        await execute(executor, verdict, "p", wall=wall)
    for verdict, wall in (("timeout", 30.0), ("memory", 1.0)):
        await execute(executor, verdict, "q", wall=wall)
    counts = dict(executor.anchors.totals)
    del counts["waited_seconds"]
    wanted = {"executions": 5.0, "correct": 2.0, "timeouts": 2.0, "timeouts_full": 1.0, "killed": 1.0}
    assert counts == {**wanted, "probes": 0.0, "seconds": 35.0, "saved_seconds": 28.0}


async def test_where_time_is_that_of_others_the_budget_is_full_and_nothing_is_learned():
    executor = LimitedExecutor(LocalAnchors(AdaptiveTimeout(FLAGS)), 4, maximum=300.0, adapts=False)
    assert [await execute(executor, "passed", wall=1.0) for _ in range(4)] == [(300.0, 300.0)] * 4
    assert len(executor.anchors.timeout) == 0
    assert executor.anchors.totals["correct"] == 4.0


@pytest.mark.slow
@pytest.mark.parametrize(("stalls", "connections"), [((0, 4, 8, 12), 2), ((1,), 1), ((0, 1, 2, 3), 4)], ids=str)
async def test_healthy_answers_that_wait_for_a_connection_outlive_those_that_stall(stalls, connections):
    turn = asyncio.Semaphore(connections)
    executor = LimitedExecutor(LocalAnchors(AdaptiveTimeout(FLAGS)), 99, maximum=2.0, adapts=False)

    async def grade(number):
        async with turn:
            return await asyncio.sleep(600 if number in stalls else 0.05, 1.0)

    def call(number):
        return executor.execute("p", "", lambda limits: run_within(grade(number), limits), lambda _: True)

    results = await asyncio.gather(*map(call, range(16)))
    assert [number for number, result in enumerate(results) if result.verdict == "timeout"] == list(stalls)


async def judged(executor, *durations):
    """Result of each answer whose judge takes so many seconds."""

    def call(seconds):
        return executor.execute("p", "", lambda limits: run_within(asyncio.sleep(seconds), limits), lambda _: True)

    return await asyncio.gather(*map(call, durations))


@pytest.mark.slow
async def test_an_outage_of_a_judge_ends_after_a_few_budgets():
    executor = LimitedExecutor(LocalAnchors(AdaptiveTimeout(FLAGS)), 99, maximum=0.5, adapts=False)
    results = await judged(executor, *[600] * 30)
    assert {result.verdict for result in results} == {"timeout"}
    assert max(result.wall for result in results) < 0.5 * 30 / 2, "1, 2, 4, 8 and 15 of them are stopped at once"


async def test_an_execution_that_begins_late_is_stopped_too():
    executor = LimitedExecutor(LocalAnchors(AdaptiveTimeout(FLAGS)), 99, maximum=0.2, adapts=False)

    async def late(limits):  # as a grader whose process has to start first
        await asyncio.sleep(0.1)
        return await run_within(asyncio.sleep(600), limits)

    results = await asyncio.gather(*(executor.execute("p", "", late, lambda _: True) for _ in range(3)))
    assert [result.verdict for result in results] == ["timeout"] * 3


@pytest.mark.slow
async def test_where_calls_are_queued_before_they_are_executed_each_has_its_own_budget():
    executor = LimitedExecutor(LocalAnchors(AdaptiveTimeout(FLAGS)), 99, maximum=1.0, adapts=False, queues=False)
    results = await judged(executor, 600, 600, 0.1, 60)
    assert [result.verdict for result in results] == ["timeout", "timeout", "done", "timeout"]


async def test_a_run_in_which_nothing_can_be_graded_is_warned_and_told_the_flag(caplog):
    executor, other = made(), made()
    for _ in range(64):
        await execute(executor, "timeout", wall=30.0)
    for number in range(64):
        await execute(other, "timeout" if number else "wrong", wall=30.0)
    assert [line.partition(" answers")[0].split()[-1] for line in caplog.messages] == ["8", "64"]
    assert all("30 s" in line and "raise rl_accel.reward_timeout.maximum" in line for line in caplog.messages)


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
    counts = executor.anchors.totals
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
    assert executor.anchors.totals["executions"] < 50


SHORT = RewardTimeoutFlags(scale=1.5, slack=0.05, minimum=0.2, maximum=20.0, min_correct=2, probe_share=0.0)
HANGS = ("while True: pass", "import time\nwhile True: time.sleep(9)")
RIGHT = "print(42)"
CASE = Case("stdin", "", "42")


@pytest.mark.parametrize("published", [(0.6, 0.9), (0.01,)], ids=["it may rise again", "it has passed already"])
@pytest.mark.parametrize("code", HANGS)
async def test_the_sandbox_stops_at_the_last_limit_and_its_worker_goes_on(code, published, processes, closed_later):
    sandbox, walls = closed_later(Sandbox(1, "process")), [30.0]

    def limits():
        return Limits(
            wall=30.0, cpu=30.0, latest=lambda: (walls.pop(0) if walls[1:] else walls[0], 20.0), check_seconds=0.02
        )

    running = asyncio.create_task(sandbox.run(code, CASE, limits()))
    await processes.executing()
    (worker,) = processes.workers()
    walls += published
    stopped = await running
    assert (stopped.verdict, stopped.reason) == ("timeout", "wall limit")
    assert published[-1] <= stopped.wall
    walls[:] = [0.9]
    for _ in range(3):
        assert (await sandbox.run(RIGHT, CASE, limits())).verdict == "passed"
    assert [worker] == processes.workers()


class Executions:
    """Stands for the sandbox: an execution ends when its limit, as it is by then, has passed, or when it is ready."""

    def __init__(self, flags=SHORT):
        self.executor = LimitedExecutor(LocalAnchors(AdaptiveTimeout(flags, caution=0.0)), 8)
        self.given = {}
        self.began = asyncio.Event()

    async def together(self, *executions):
        """Execute ``(name, seconds)`` or ``(name, seconds, verdict)``, all for one prompt."""
        calls = (self.executor.execute("p", "0", self._taking(*one), passed) for one in executions)
        return await asyncio.gather(*calls)

    def _taking(self, name, seconds, verdict="passed"):
        async def run(limits):
            loop = asyncio.get_running_loop()
            began, given = loop.time(), self.given.setdefault(name, [limits.wall])
            self.began.set()
            while (left := began + min(seconds, given[-1]) - loop.time()) > 0:
                await asyncio.sleep(min(left, limits.check_seconds))
                if left > limits.check_seconds and (wall := limits.times()[0]) != given[-1]:
                    given.append(wall)
            return ExecutionResult(verdict if seconds <= given[-1] else "timeout", wall=min(seconds, given[-1]))

        return run


async def test_a_hang_that_began_with_the_full_budget_ends_soon_after_enough_others_were_correct():
    executions = Executions()
    hung, *others = await executions.together(("hangs", 60.0), ("first", 0.02), ("second", 0.03))
    assert (hung.verdict, hung.wall) == ("timeout", 0.2)
    assert [result.verdict for result in others] == ["passed", "passed"]
    assert (executions.given["hangs"], executions.given["first"]) == ([20.0, 0.2], [20.0])
    counts = executions.executor.anchors.totals
    assert (counts["timeouts"], counts["timeouts_full"], counts["saved_seconds"]) == (1.0, 0.0, pytest.approx(19.8))


@pytest.mark.parametrize(
    ("flags", "seconds", "others", "counted"),
    [
        ({}, 60.0, [("right", 0.02), ("wrong", 0.02, "wrong")], {"timeouts_full": 1.0, "probes": 0.0}),
        ({"min_correct": 1, "probe_share": 1.0}, 0.5, [("right", 0.02)], {"timeouts": 0.0, "probes": 1.0}),
    ],
    ids=["while too few were correct", "as a probe"],
)
async def test_it_keeps_the_full_budget(flags, seconds, others, counted):
    executions = Executions(replace(SHORT, minimum=0.1, maximum=0.8, **flags))
    slow, *_ = await executions.together(("slow", seconds), *others)
    assert (slow.wall, executions.given["slow"]) == (min(seconds, 0.8), [0.8])
    counts = executions.executor.anchors.totals
    assert {name: counts[name] for name in counted} == counted


async def test_its_limit_rises_with_the_anchor():
    executions = Executions(replace(SHORT, scale=6.0, slack=0.2, minimum=1.5))
    others = ("first", 0.02), ("second", 0.03), ("slower", 0.3), ("slower still", 0.5)
    results = await executions.together(("slow", 60.0), *others)
    assert [result.verdict for result in results] == ["timeout", *["passed"] * 4]
    given = executions.given["slow"]
    assert given[0] == 20.0
    assert given[1:] == sorted(given[1:])
    assert results[0].wall == given[-1] == pytest.approx(6.0 * 0.5 + 0.2)


async def test_what_others_have_learned_counts_for_one_that_runs_too():
    executions = Executions()
    running = asyncio.create_task(executions.together(("slow", 60.0)))
    await executions.began.wait()
    executions.executor.anchors.timeout.merge({"p/0": (0.4, 0.1, 7)})
    (slow,) = await running
    assert executions.given["slow"] == pytest.approx([20.0, 0.65])
    assert (slow.verdict, slow.wall) == ("timeout", executions.given["slow"][-1])


@pytest.mark.parametrize("isolation", ["process", "auto"])
async def test_a_group_with_a_hang_takes_no_longer_than_its_limit_with_real_processes(isolation, closed_later):
    sandbox = closed_later(Sandbox(2, isolation))
    executor = LimitedExecutor(LocalAnchors(AdaptiveTimeout(replace(SHORT, maximum=60.0), caution=0.0)), 2)
    runs = (execute_program(executor, sandbox, "p", code, [CASE]) for code in (HANGS[0], *[RIGHT] * 6))
    (hung,), *others = await asyncio.gather(*runs)
    assert [result.verdict for (result,) in others] == ["passed"] * 6
    assert (hung.verdict, hung.reason) == ("timeout", "wall limit")
    assert hung.wall < 60


def test_the_key_of_a_prompt_does_not_hold_the_address_of_an_object():
    images = [object() for _ in range(3)]
    assert len({prompt_key("a", {"image": image}) for image in images}) == 1
    assert len({prompt_key("a", {1: image, "b": 2}) for image in images}) == 1
    assert prompt_key("a", object()) != prompt_key("b", object())
