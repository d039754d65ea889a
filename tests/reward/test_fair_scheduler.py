import asyncio
import contextlib
import random

import pytest

from rl_accel.reward.limited_executor import FairScheduler


def play(main):
    return asyncio.run(asyncio.wait_for(main, 20))


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


class Stage:
    """Executions that start when they get their turn and end when told to."""

    def __init__(self, slots):
        self.scheduler = FairScheduler(slots)
        self.running = []
        self.began = []
        self.ends = {}
        self.tasks = {}
        self.late = {}

    def enter(self, name, prompt, expected=1.0):
        self.tasks[name] = asyncio.create_task(self._run(name, prompt, expected))

    async def _run(self, name, prompt, expected):
        async with self.scheduler.slot(prompt, expected) as self.late[name]:
            self.began.append(name)
            self.running.append(name)
            self.ends[name] = asyncio.Event()
            try:
                await self.ends[name].wait()
            finally:
                self.running.remove(name)

    async def end(self, name):
        self.ends[name].set()
        await settle()

    async def cancel(self, name):
        self.tasks[name].cancel()
        await settle()


def test_a_prompt_with_a_late_execution_goes_first_with_one_more():
    async def main():
        stage = Stage(2)
        for name in ("p0", "q0", "q1", "r0", "p1", "p2", "s0"):
            stage.enter(name, name[0])
        await settle()
        assert stage.running == ["p0", "q0"]
        stage.late["p0"]()
        await stage.end("q0")
        assert stage.running == ["p0", "p1"]  # and neither q1, which came first, nor r0, whose prompt holds none
        stage.enter("q2", "q")
        await stage.end("p1")
        assert stage.running == ["p0", "p2"]
        await stage.end("p2")
        assert stage.running == ["p0", "q1"]
        await stage.end("p0")
        stage.enter("p3", "p")
        await stage.end("q1")
        assert stage.running == ["r0", "s0"]  # over, and p is as any other

    play(main())


def test_late_executions_of_one_prompt_take_over_no_more_than_one_slot_before_others():
    async def main():
        stage = Stage(4)
        for i in range(6):
            stage.enter(f"p{i}", "p")
        for i in range(6):
            stage.enter(f"q{i}", "q")
        await settle()
        assert stage.running == ["p0", "p1", "p2", "p3"]
        stage.late["p0"]()
        stage.late["p1"]()
        for ends in ("p2", "p3", "p4", "q0"):
            await stage.end(ends)
        assert stage.running == ["p0", "p1", "p5", "q1"]

    play(main())


def test_no_more_run_at_once_than_there_are_slots():
    async def main():
        stage = Stage(2)
        for i in range(5):
            stage.enter(i, f"p{i}")
        await settle()
        assert len(stage.running) == 2
        for _ in range(5):
            await stage.end(stage.running[0])
        assert sorted(stage.began) == [0, 1, 2, 3, 4]

    play(main())


def test_the_shortest_expected_goes_first():
    async def main():
        stage = Stage(1)
        stage.enter("now", "p")
        await settle()
        for name, expected in (("long", 30.0), ("short", 2.0), ("middle", 9.0)):
            stage.enter(name, name, expected)
        await settle()
        for _ in range(4):
            await stage.end(stage.running[0])
        assert stage.began == ["now", "short", "middle", "long"]

    play(main())


def test_a_prompt_with_many_executions_does_not_keep_others_out():
    async def main():
        stage = Stage(2)
        for i in range(6):
            stage.enter(f"a{i}", "a", 0.1)
        stage.enter("b0", "b", 5.0)
        await settle()
        assert stage.running == ["a0", "a1"]
        await stage.end("a0")
        assert stage.running == ["a1", "b0"]

    play(main())


def test_waiting_makes_up_for_a_long_expectation(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("rl_accel.reward.limited_executor.monotonic", lambda: clock[0])

    async def main():
        stage = Stage(1)
        stage.enter("now", "p")
        stage.enter("long", "q", 30.0)
        await settle()
        clock[0] = 29.0
        stage.enter("short", "r", 2.0)
        await settle()
        await stage.end("now")
        assert stage.running == ["long"]

    play(main())


def test_a_cancelled_wait_leaves_its_place_and_a_cancelled_execution_its_slot():
    async def main():
        stage = Stage(1)
        for name in "abc":
            stage.enter(name, name)
        await settle()
        await stage.cancel("b")
        await stage.cancel("a")
        assert stage.running == ["c"]

    play(main())


def test_a_turn_that_was_given_to_a_task_being_cancelled_goes_on_to_the_next():
    async def main():
        stage = Stage(1)
        for name in "abc":
            stage.enter(name, name)
        await settle()
        stage.ends["a"].set()
        await asyncio.sleep(0)  # a has ended, b holds its turn and has not run
        await asyncio.sleep(0)
        stage.tasks["b"].cancel()
        await settle()
        assert stage.running == ["c"]

    play(main())


@pytest.mark.parametrize("seed", range(20))
def test_every_execution_gets_its_turn_under_random_cancellation(seed):
    dice = random.Random(seed)

    async def main():
        slots = dice.randint(1, 4)
        scheduler, ended = FairScheduler(slots), []

        async def one(i):
            async with scheduler.slot(f"p{dice.randint(0, 3)}", dice.random()):
                for _ in range(dice.randint(0, 3)):
                    await asyncio.sleep(0)
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

    play(main())


def test_slots_must_be_a_number_above_zero():
    with pytest.raises(ValueError, match="at least 1, found 0"):
        FairScheduler(0)
