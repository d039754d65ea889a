"""Coroutines within a limit that may move, and several of which the first failure ends the others."""

import asyncio
import time

import pytest

from rl_accel.reward.execution import Limits, LimitUpdates, gather_until, run_within


def test_an_awaited_grader_is_held_to_its_limit():
    async def answer(seconds, value):
        await asyncio.sleep(seconds)
        return value

    async def fails():
        await asyncio.sleep(0)
        raise TimeoutError("the server's own")

    async def quits():
        raise SystemExit(3)

    async def gives_up():
        raise asyncio.CancelledError

    async def main():
        limits = Limits(wall=0.2)
        found = await asyncio.gather(
            run_within(answer(0.01, 7), limits, "a"),
            run_within(answer(60, 7), limits, "a"),
            run_within(fails(), limits, "a"),
            run_within(quits(), limits, "a"),
            run_within(gives_up(), limits, "a"),
        )
        return [(result.verdict, result.value, result.reason) for result in found]

    began = time.monotonic()
    assert asyncio.run(main()) == [
        ("done", 7, ""),
        ("timeout", None, "wall limit"),
        ("error", None, "TimeoutError: the server's own"),
        ("error", None, "RuntimeError: SystemExit: 3"),
        ("error", None, "it was cancelled, and not by us"),
    ]
    assert time.monotonic() - began < 5


def test_a_limit_may_change_while_a_grader_is_awaited():
    async def main():
        updates = LimitUpdates()
        grading = asyncio.ensure_future(run_within(asyncio.sleep(60), Limits(wall=50.0, updates=updates), "a"))
        longer = LimitUpdates()
        other = asyncio.ensure_future(run_within(asyncio.sleep(0.6, 7), Limits(wall=0.3, updates=longer), "a"))
        await asyncio.sleep(0)  # both have begun
        updates.publish(0.2, 1.0)
        longer.publish(30.0, 1.0)
        return await grading, await other

    short, long = asyncio.run(main())
    assert (short.verdict, long.verdict, long.value) == ("timeout", "done", 7)
    assert 0.15 < short.wall < 2


def test_cancelling_reaches_an_awaited_grader():
    seen, began = [], asyncio.Event()

    async def grader():
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            seen.append("stopped")

    async def main():
        task = asyncio.ensure_future(run_within(grader(), Limits(), "a"))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)

    asyncio.run(main())
    assert seen == ["stopped"]


def test_a_grader_that_holds_the_event_loop_is_reported_once(caplog):
    async def grader():
        time.sleep(1.1)
        await asyncio.sleep(0)

    async def main():
        for _ in range(2):
            assert (await run_within(grader(), Limits(), "my.grader")).verdict == "done"

    asyncio.run(main())
    assert [record.getMessage().split(" for ")[0] for record in caplog.records] == [
        "rl-accel: my.grader held the event loop"
    ]


def test_results_are_in_order_and_the_first_that_ends_it_cancels_the_others():
    ended = []

    async def after(seconds, value):
        try:
            await asyncio.sleep(seconds)
        finally:
            ended.append(value)
        return value

    async def main():
        assert await gather_until(after(seconds, seconds) for seconds in (0.2, 0.0, 0.1)) == [0.2, 0.0, 0.1]
        assert await gather_until([]) == []
        ended.clear()
        assert await gather_until([after(60, "a"), after(0, "b"), after(60, "c")], lambda value: value == "b") == ["b"]
        await asyncio.sleep(0)
        assert sorted(ended) == ["a", "b", "c"]

    asyncio.run(main())


def test_an_error_of_one_is_raised_and_cancels_the_others():
    ended = []

    async def fails():
        raise KeyError("x")

    async def waits():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("waits")

    async def main():
        with pytest.raises(KeyError):
            await gather_until([waits(), fails()])
        await asyncio.sleep(0)

    asyncio.run(main())
    assert ended == ["waits"]
