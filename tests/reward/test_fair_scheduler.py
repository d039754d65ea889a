"""Tests the order in which executions get a slot, and the effects of cancellation."""

import asyncio
import contextlib
import random

import pytest

from rl_accel.reward.limited_executor import FairScheduler

pytestmark = pytest.mark.timeout(60)


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


class Stage:
    """Executions that start when they get their turn and end when told to. The first letter of a name is its prompt."""

    def __init__(self, slots):
        self.scheduler = FairScheduler(slots)
        self.running, self.ends, self.tasks, self.late = [], {}, {}, {}

    async def enter(self, *names, expected=1.0):
        for name in names:
            self.tasks[name] = asyncio.create_task(self._run(name, expected))
        await settle()

    async def _run(self, name, expected):
        async with self.scheduler.slot(name[0], expected) as self.late[name]:
            self.running.append(name)
            self.ends[name] = asyncio.Event()
            try:
                await self.ends[name].wait()
            finally:
                self.running.remove(name)

    async def end(self, *names):
        for name in names:
            self.ends[name].set()
            await settle()

    async def cancel(self, name):
        self.tasks[name].cancel()
        await settle()


async def test_a_prompt_with_a_late_execution_goes_first_with_one_more():
    stage = Stage(2)
    await stage.enter("p0", "q0", "q1", "r0", "p1", "p2", "s0")
    assert stage.running == ["p0", "q0"]
    stage.late["p0"]()
    await stage.end("q0")
    assert stage.running == ["p0", "p1"]  # and neither q1, which came first, nor r0, whose prompt holds none
    await stage.enter("q2")
    await stage.end("p1")
    assert stage.running == ["p0", "p2"]
    await stage.end("p2")
    assert stage.running == ["p0", "q1"]
    await stage.end("p0")
    await stage.enter("p3")
    await stage.end("q1")
    assert stage.running == ["r0", "s0"]  # over, and p is as any other


async def test_late_executions_of_one_prompt_take_over_no_more_than_one_slot_before_others():
    stage = Stage(4)
    await stage.enter(*(f"{prompt}{i}" for prompt in "pq" for i in range(6)))
    assert stage.running == ["p0", "p1", "p2", "p3"]
    stage.late["p0"]()
    stage.late["p1"]()
    await stage.end("p2", "p3", "p4", "q0")
    assert stage.running == ["p0", "p1", "p5", "q1"]


async def test_the_shortest_expected_goes_first():
    stage = Stage(1)
    await stage.enter("now")
    for name, expected in (("long", 30.0), ("short", 2.0), ("middle", 9.0)):
        await stage.enter(name, expected=expected)
    for ended, next_name in (("now", "short"), ("short", "middle"), ("middle", "long")):
        await stage.end(ended)
        assert stage.running == [next_name]


async def test_a_prompt_with_many_executions_does_not_keep_others_out():
    stage = Stage(2)
    await stage.enter(*(f"a{i}" for i in range(6)), expected=0.1)
    await stage.enter("b0", expected=5.0)
    assert stage.running == ["a0", "a1"]
    await stage.end("a0")
    assert stage.running == ["a1", "b0"]


async def test_waiting_makes_up_for_a_long_expectation(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("rl_accel.reward.limited_executor.monotonic", lambda: clock[0])
    stage = Stage(1)
    await stage.enter("now")
    await stage.enter("long", expected=30.0)
    clock[0] = 29.0
    await stage.enter("short", expected=2.0)
    await stage.end("now")
    assert stage.running == ["long"]


async def test_a_turn_that_was_given_to_a_task_being_cancelled_goes_on_to_the_next():
    stage = Stage(1)
    await stage.enter("a", "b", "c")
    stage.ends["a"].set()
    await asyncio.sleep(0)  # a has ended, b holds its turn and has not run
    await asyncio.sleep(0)
    await stage.cancel("b")
    assert stage.running == ["c"]


@pytest.mark.parametrize("seed", range(20))
async def test_every_execution_gets_its_turn_and_a_slot_under_random_cancellation(seed):
    dice = random.Random(seed)
    slots = dice.randint(1, 4)
    scheduler, running, ended = FairScheduler(slots), set(), []

    async def one(i):
        async with scheduler.slot(f"p{dice.randint(0, 3)}", dice.random()):
            running.add(i)
            assert len(running) <= slots
            try:
                for _ in range(dice.randint(0, 3)):
                    await asyncio.sleep(0)
            finally:
                running.remove(i)
        ended.append(i)

    tasks = [asyncio.create_task(one(i)) for i in range(60)]
    cancelled = set()
    for i in dice.sample(range(60), 20):
        await asyncio.sleep(0)
        if not tasks[i].done():
            tasks[i].cancel()
            cancelled.add(i)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert {i for i in range(60) if i not in cancelled} <= set(ended)
    async with asyncio.timeout(5), contextlib.AsyncExitStack() as stack:
        for _ in range(slots):
            await stack.enter_async_context(scheduler.slot("all are free again", 1.0))


def test_slots_must_be_a_number_above_zero():
    with pytest.raises(ValueError, match="at least 1, found 0"):
        FairScheduler(0)
