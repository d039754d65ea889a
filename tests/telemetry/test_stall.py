"""Tests that stages and waits are recognised on real stacks, and when a stage counts as standing still."""

import asyncio
import math
import random
import threading

import pytest

from rl_accel.telemetry import stall
from rl_accel.telemetry.stall import Patience, Place, Report, Seen, Wait


def stage(what, step):
    return Seen(Place(what, step=lambda _frame: step), "", step, (what, step))


def events(patience, stages, look=5.0):
    """Returns what ``patience`` says at looks every ``look`` seconds, for ``stages``: pairs of a stage and its seconds."""
    said, now = [], 0.0
    for present, seconds in stages:
        for _ in range(math.ceil(seconds / look)):
            said.append((now, patience.look(present, now)))
            now += look
    return [(at, event) for at, event in said if event]


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_whose_stages_vary_by_four_times_raises_no_alarm_in_200_steps(seed):
    rng = random.Random(seed)
    stages = []
    for step in range(200):
        stages += [(stage("gen", step), rng.uniform(500, 2000)), (stage("update_actor", step), rng.uniform(100, 400))]
    # the first steps, with no median yet, are not longer than the least patience
    quick = [(stage("gen", -step), rng.uniform(150, 590)) for step in range(1, 3)]
    assert events(Patience(3000.0), stages) == []
    assert events(Patience(None), [*quick, *[(seen, seconds / 3.4) for seen, seconds in stages]]) == []


def test_an_alarm_comes_after_the_patience_and_again_after_each_further_one_and_the_end_is_told():
    patience = Patience(60.0)
    said = events(patience, [(stage("gen", 1), 30), (stage("gen", 2), 200), (stage("update_actor", 2), 30)])
    assert said == [(95.0, "alarm"), (155.0, "alarm"), (215.0, "alarm"), (230.0, "moves again")]
    assert patience.alarms == 0


def test_the_default_patience_is_the_larger_of_ten_minutes_and_five_medians_of_the_same_stage():
    patience = Patience(None)
    steps = [(stage("gen", step), seconds) for step, seconds in enumerate([100, 200, 500])]
    events(patience, [*steps, (stage("update_actor", 3), 40), (stage("gen", 3), 5)])
    assert patience.limit() == 5 * 200
    patience.look(stage("update_actor", 4), 10_000.0)
    assert patience.limit() == stall.LEAST_PATIENCE


PLACES = {
    __name__: {
        "waits": Place("tool", stall.text_of("{name}"), flag="the.flag"),
        "blocks": Place("grader"),
        "fails_to_describe": Place("other", stall.text_of("{absent}")),
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
    yield lambda: [seen for _, frames in stall.live_stacks() for seen in stall.find_places(frames, PLACES)]
    until.set()
    for thread in threads:
        thread.join()


def test_a_blocked_event_loop_and_the_tasks_that_it_keeps_waiting_are_seen(seen_while_blocked):
    places = seen_while_blocked()
    assert sorted((seen.place.what, seen.detail) for seen in places if seen.place.step is None) == [
        ("grader", ""),
        ("other", ""),
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
    assert "(2)\n" in text
    assert "secret" not in text


def test_the_summary_names_silent_processes_first_and_of_each_kind_the_longest_wait_with_its_flag():
    reports = [
        Report(
            "loop 1", 0.0, [Wait("tool", "search", 90.0, ""), Wait("reward", "prompt a", 40.0, "x.limit")], [], "", ""
        ),
        Report("loop 2", 0.0, [Wait("tool", "browse", 20.0, "")], ["child process 5 is stopped (loop 2)"], "", ""),
    ]
    assert stall.summary(reports, ["rank 1"], 100.0) == (
        "no answer from rank 1; child process 5 is stopped (loop 2); "
        "2 wait for tool, the longest for 80 s in loop 2: browse; "
        "1 wait for reward, the longest for 60 s in loop 1: prompt a (x.limit limits it)"
    )
    assert stall.summary([], [], 0.0) == "no process is in a known wait, see the stacks"
    assert stall.summary([], [str(number) for number in range(9)], 0.0).endswith("no answer from 3 more")
