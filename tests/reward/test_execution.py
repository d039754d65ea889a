"""Tests time limits that change, coroutines under a limit, and groups of coroutines that end at the first failure."""

import asyncio

import pytest

from rl_accel.reward.limited_executor import Limits, gather_until, run_within

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
    result = await run_within(answer(seconds, error), Limits(wall=0.2))
    assert (result.verdict, result.reason) == (verdict, reason)
    assert result.value == (seconds if verdict == "done" else None)


async def test_a_limit_may_change_while_a_grader_is_awaited():
    walls = {"shorter": 50.0, "longer": 0.3}

    def limits(name):
        return Limits(wall=walls[name], latest=lambda: (walls[name], 1.0), check_seconds=0.02)

    grading = asyncio.create_task(run_within(answer(60), limits("shorter")))
    other = asyncio.create_task(run_within(answer(0.6), limits("longer")))
    await asyncio.sleep(0)  # both have begun
    walls.update(shorter=0.2, longer=30.0)
    short, long = await grading, await other
    assert (short.verdict, long.verdict, long.value) == ("timeout", "done", 0.6)
    assert 0.15 < short.wall < 2


async def test_cancelling_reaches_an_awaited_grader():
    ended = []
    task = asyncio.create_task(run_within(answer(60, ended=ended), Limits()))
    for _ in range(5):  # it has begun
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert ended == [60]


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
