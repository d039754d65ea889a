"""Tests time limits that change, coroutines under a limit, and groups of coroutines that end at the first failure."""

import asyncio
import contextlib
import os
import threading
import time

import psutil
import pytest

from rl_accel.reward.execution import Limits, gather_until, run_within
from rl_accel.reward.grader_threads import GraderThreads, threads_of_execution

pytestmark = pytest.mark.timeout(60)


async def answer(seconds, error=None, ended=None):
    try:
        await asyncio.sleep(seconds)
    finally:
        if ended is not None:
            ended.append(seconds)
    if error is not None:
        raise error
    return seconds


@pytest.mark.parametrize(
    ("seconds", "error", "verdict", "reason"),
    [
        (0.01, None, "done", ""),
        (60, None, "timeout", "wall limit"),
        (0, TimeoutError("the server's own"), "error", "TimeoutError: the server's own"),
        (0, SystemExit(3), "error", "RuntimeError: SystemExit: 3"),
        (0, asyncio.CancelledError(), "error", "the grader was cancelled by other code"),
    ],
)
async def test_an_awaited_grader_is_held_to_its_limit(seconds, error, verdict, reason):
    result = await run_within(answer(seconds, error), Limits(wall=0.2), "a")
    assert (result.verdict, result.reason) == (verdict, reason)
    assert result.value == (seconds if verdict == "done" else None)


async def test_a_limit_may_change_while_a_grader_is_awaited():
    walls = {"shorter": 50.0, "longer": 0.3}

    def limits(name):
        return Limits(wall=walls[name], latest=lambda: (walls[name], 1.0), check_seconds=0.02)

    grading = asyncio.create_task(run_within(answer(60), limits("shorter"), "a"))
    other = asyncio.create_task(run_within(answer(0.6), limits("longer"), "a"))
    await asyncio.sleep(0)  # both have begun
    walls.update(shorter=0.2, longer=30.0)
    short, long = await grading, await other
    assert (short.verdict, long.verdict, long.value) == ("timeout", "done", 0.6)
    assert 0.15 < short.wall < 2


async def test_cancelling_reaches_an_awaited_grader():
    ended = []
    task = asyncio.create_task(run_within(answer(60, ended=ended), Limits(), "a"))
    for _ in range(5):  # it has begun
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert ended == [60]


RESTARTS_A_CHILD = 'sleep "$0" & first=$!; for _ in $(seq 30); do sleep "$0" & done; wait $first; sleep "$0"'
"""A shell and 31 programs, the first of which it starts again when that is killed; $0 marks all of them."""


def processes_with(word):
    """Living processes that have ``word`` on their command line, wherever they are in the tree."""
    return [found for found in psutil.process_iter(["cmdline"]) if word in (found.info["cmdline"] or ())]


async def test_processes_that_a_coroutine_has_started_end_at_its_limit_and_those_of_others_do_not():
    graded, other = f"600.{os.getpid()}", f"601.{os.getpid()}"

    async def start(word):
        return await asyncio.create_subprocess_exec("sh", "-c", RESTARTS_A_CHILD, word)

    async def grade(seconds):
        process = await start(graded)
        with contextlib.suppress(TimeoutError):  # its own limit, as many graders have; a cancellation is none
            await asyncio.wait_for(process.wait(), seconds)

    others = await start(other)
    grading = asyncio.create_task(run_within(grade(600), Limits(wall=60.0), "a"))
    while len(processes_with(graded)) < 32 or len(processes_with(other)) < 32:
        await asyncio.sleep(0.01)
    try:
        grading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await grading
        while processes_with(graded):
            await asyncio.sleep(0.01)
        assert others.pid in {process.pid for process in processes_with(other)}
    finally:
        others.kill()
        for process in (*processes_with(graded), *processes_with(other)):
            process.kill()
        await others.wait()


class LoopThatHidesItsExecutor:
    """An event loop as those of uvloop, which Ray's actors use where it is installed."""

    def __init__(self):
        self.executors = []
        self.set_default_executor = self.executors.append


def test_all_executions_of_a_loop_share_its_threads_even_if_the_loop_does_not_show_them():
    loop = LoopThatHidesItsExecutor()
    for _ in range(3):
        with threads_of_execution(loop):
            pass
    assert len(loop.executors) == 1


async def test_hung_threads_leave_threads_for_later_calls():
    hung, calls = threading.Event(), 40

    async def grade(seconds):
        return await asyncio.to_thread(hung.wait, seconds)

    try:
        results = await asyncio.gather(*(run_within(grade(600), Limits(wall=0.2), "a") for _ in range(calls)))
        assert {result.verdict for result in results} == {"timeout"}
        result = await run_within(grade(0), Limits(wall=60.0), "a")
        assert (result.verdict, result.value) == ("done", False)
        executor = asyncio.get_running_loop()._default_executor
        assert executor._max_workers > GraderThreads()._max_workers
    finally:
        hung.set()
    await asyncio.to_thread(hung.wait, 0)
    while executor._max_workers > GraderThreads()._max_workers:
        await asyncio.sleep(0.01)


async def test_a_grader_that_holds_the_event_loop_is_reported_once(caplog):
    async def grader():
        time.sleep(1.1)
        await asyncio.sleep(0)

    for _ in range(2):
        assert (await run_within(grader(), Limits(), "my.grader")).verdict == "done"
    (record,) = caplog.records
    assert record.getMessage().startswith("rl-accel: my.grader held the event loop for ")


async def test_results_are_in_order_and_the_first_that_ends_it_or_fails_cancels_the_others():
    assert await gather_until(answer(seconds) for seconds in (0.2, 0.0, 0.1)) == [0.2, 0.0, 0.1]
    assert await gather_until([]) == []
    ended = []
    running = [answer(60, ended=ended), answer(0, ended=ended), answer(61, ended=ended)]
    assert await gather_until(running, lambda value: value == 0) == [0]
    await asyncio.sleep(0)
    assert sorted(ended) == [0, 60, 61]
    with pytest.raises(KeyError):
        await gather_until([answer(62, ended=ended), answer(0, KeyError("x"))])
    await asyncio.sleep(0)
    assert ended[3:] == [62]
