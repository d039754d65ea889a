"""Tests that stages and waits are recognised on real stacks, and when a stage counts as standing still."""

import asyncio
import math
import random
import threading

import pytest

from rl_accel.integrations.ray import stall
from rl_accel.integrations.ray.stall import Patience, Place, Seen


def stage(what, step, detail=""):
    return Seen(Place(what, step=lambda _frame: step), detail, step, (what, step))


def alarms(patience, stages, look=5.0):
    """Returns the times of alarms, at looks every ``look`` seconds, for ``stages``: pairs of a stage and its seconds."""
    times, now = [], 0.0
    for present, seconds in stages:
        for _ in range(math.ceil(seconds / look)):
            if patience.look(present, now):
                times.append(now)
            now += look
    return times


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_whose_stages_vary_by_four_times_raises_no_alarm_in_200_steps(seed):
    rng = random.Random(seed)
    stages = []
    for step in range(200):
        stages += [(stage("gen", step), rng.uniform(500, 2000)), (stage("update_actor", step), rng.uniform(100, 400))]
    # the first steps, with no median yet, are not longer than the least patience
    quick = [(stage("gen", -step), rng.uniform(150, 590)) for step in range(1, 3)]
    assert alarms(Patience(3000.0), stages) == []
    assert alarms(Patience(None), [*quick, *[(seen, seconds / 3.4) for seen, seconds in stages]]) == []


def test_an_alarm_comes_after_the_patience_and_again_after_each_further_one():
    stages = [(stage("gen", 1), 30), (stage("gen", 2), 200), (stage("update_actor", 2), 30)]
    assert alarms(Patience(60.0), stages) == [95.0, 155.0, 215.0]


def test_the_default_patience_is_the_larger_of_ten_minutes_and_five_medians_of_the_same_stage():
    known = [(stage("gen", step), seconds) for step, seconds in enumerate([100, 200, 500])]
    assert alarms(Patience(None), [*known, (stage("gen", 3), 1200)]) == [800 + 5 * 200 + 5]
    assert alarms(Patience(None), [*known, (stage("update_actor", 3), 1000)]) == [800 + stall.LEAST_PATIENCE + 5]


def test_a_first_stage_in_which_prompts_finish_is_slow_and_does_not_stand_still():
    moves = [(stage("gen", 1, f"{awaited} prompts are awaited"), 500) for awaited in (3, 2, 1)]
    assert alarms(Patience(None), moves) == []
    assert alarms(Patience(None), [*moves, (stage("gen", 1, "1 prompts are awaited"), 500)]) == [1000 + 600 + 5]


PLACES = {
    __name__: {
        "waits": Place("tool", "{name}"),
        "blocks": Place("grader"),
        "fails_to_describe": Place("other", "{absent}"),
        "Trainer.step": Place("gen", step=lambda frame: frame.f_locals["self"].number),
    }
}


async def waits(name, secret, until):
    await until.wait()


class Awaitable:
    """Hides the coroutine that it awaits, as the compiled coroutines do in which Ray runs the methods of actors."""

    def __init__(self, coroutine):
        self.coroutine = coroutine

    def __await__(self):
        return self.coroutine.__await__()


async def waits_in_ray(name, until):
    await Awaitable(waits(name, "a secret prompt", until))


async def blocks(inside, until):
    inside.set()
    until.wait()  # in the event loop, which runs nothing else meanwhile


def fails_to_describe(then):
    then()


class Trainer:
    number = 7

    def step(self, inside, until):
        inside.set()
        until.wait()


@pytest.fixture
def seen_while_blocked():
    """``seen_while_blocked()`` returns the places of all stacks while one task waits and another blocks the event loop."""
    inside, until, stepping = threading.Event(), threading.Event(), threading.Event()

    async def main():
        tasks = [asyncio.create_task(waits(name, "a secret prompt", asyncio.Event())) for name in ("a", "b")]
        tasks.append(asyncio.create_task(waits_in_ray("c", asyncio.Event())))
        await asyncio.sleep(0)  # until they wait
        await asyncio.create_task(blocks(inside, until))
        for task in tasks:
            task.cancel()

    threads = [threading.Thread(target=asyncio.run, args=(main(),))]
    threads.append(threading.Thread(target=fails_to_describe, args=(lambda: Trainer().step(stepping, until),)))
    for thread in threads:
        thread.start()
    assert inside.wait(60)
    assert stepping.wait(60)
    yield lambda: [seen for frames in stall.live_stacks() for seen in stall.find_places(frames, PLACES)]
    until.set()
    for thread in threads:
        thread.join()


def test_a_blocked_event_loop_and_the_tasks_that_it_keeps_waiting_are_seen(seen_while_blocked):
    places = seen_while_blocked()
    assert sorted((seen.place.what, seen.detail) for seen in places if seen.place.step is None) == [
        ("grader", "blocks"),
        ("other", "fails_to_describe"),
        ("tool", "a"),
        ("tool", "b"),
        ("tool", "c"),
    ]
    assert [seen.step for seen in places if seen.place.step] == [7]
    assert {seen.identity for seen in places} == {seen.identity for seen in seen_while_blocked()}


def test_the_text_has_equal_stacks_once_and_no_values(seen_while_blocked):
    text = stall.stack_text()
    assert "in blocks" in text
    assert "in Trainer.step" in text
    assert text.count("in waits\n") == 2
    assert "  2 at\n" in text
    assert "secret" not in text


def test_the_summary_names_problems_first_and_of_each_kind_the_longest_wait():
    waits = [
        ((90.0, "tool", ", search"), "loop 2"),
        ((20.0, "tool", ", browse"), "loop 1"),
        ((40.0, "reward", ", prompt a (x.limit limits it)"), "loop 1"),
    ]
    assert stall.summary(waits, ["no answer from rank 1"], 100.0) == (
        "no answer from rank 1; 2 wait for tool, the longest for 80 s in loop 1, browse; "
        "1 wait for reward, the longest for 60 s in loop 1, prompt a (x.limit limits it)"
    )
    assert stall.summary([], [], 0.0) == "no process is in a known wait, see the stacks"
    assert stall.summary([], [str(number) for number in range(9)], 0.0).endswith("5; 3 more processes like these")
