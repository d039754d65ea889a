"""Tests that cancelled code is cancelled once, cleans up in the background, and is cut off only at its limit."""

import asyncio

import pytest

from rl_accel.rollout import cleanup
from rl_accel.rollout.cleanup import CancellableCode


class AgentLoop:
    """Waits for an answer. Then, or when cancelled, closes its sandbox, which ends when ``closing_may_end`` is set."""

    def __init__(self):
        self.started, self.closing_may_end = asyncio.Event(), asyncio.Event()
        self.busy = False
        self.seen = []

    async def run(self):
        try:
            self.started.set()
            await asyncio.Event().wait()
        finally:
            self.seen.append("closing")
            try:
                await self.closing_may_end.wait()
                self.seen.append("closed")
            except asyncio.CancelledError:
                self.seen.append("cut off")
                raise

    async def cancelled(self, cleanups, is_cancelled=lambda: False):
        """Runs this loop, cancels the caller, and returns when the caller has ended."""
        caller = asyncio.create_task(cleanups.run(self.run(), lambda: self.busy, is_cancelled))
        await self.started.wait()
        caller.cancel()
        await asyncio.wait({caller})
        assert caller.cancelled()


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(cleanup, "GRACE_SECONDS", 0.01)


async def test_clean_up_goes_on_when_the_caller_has_ended():
    loop, cleanups = AgentLoop(), CancellableCode(None)
    await loop.cancelled(cleanups)
    assert loop.seen == ["closing"]
    loop.closing_may_end.set()
    await cleanups.wait()
    assert loop.seen == ["closing", "closed"]
    await cleanups.wait()


async def test_a_second_cancellation_of_the_caller_does_not_reach_the_clean_up():
    loop, cleanups = AgentLoop(), CancellableCode(None)
    loop.busy = True
    caller = asyncio.create_task(cleanups.run(loop.run(), lambda: loop.busy))
    await loop.started.wait()
    for _ in range(2):
        caller.cancel()
        while loop.seen != ["closing"]:
            await asyncio.sleep(0)
    await asyncio.wait({caller})
    loop.closing_may_end.set()
    await cleanups.wait()
    assert loop.seen == ["closing", "closed"]


async def test_code_that_has_a_request_is_waited_for_and_code_that_is_cancelled_already_is_not_cancelled_again():
    loop, cleanups = AgentLoop(), CancellableCode(None)
    loop.busy = True
    ended = asyncio.create_task(loop.cancelled(cleanups))
    while loop.seen != ["closing"]:
        await asyncio.sleep(0)
    await asyncio.sleep(5 * cleanup.GRACE_SECONDS)
    assert not ended.done()
    loop.busy = False
    await ended
    other = AgentLoop()
    await other.cancelled(cleanups, is_cancelled=lambda: True)
    assert other.seen == []
    for each in (loop, other):
        each.closing_may_end.set()


async def test_clean_up_that_never_ends_is_cut_off_at_its_limit_with_a_line(caplog):
    loop, cleanups = AgentLoop(), CancellableCode(0.05)
    await loop.cancelled(cleanups)
    await cleanups.wait()
    assert loop.seen == ["closing", "cut off"]
    assert caplog.messages == ["rl-accel: clean-up of a cancelled response is cut off after 0.05 s (cleanup_limit)"]


async def test_clean_up_that_fails_in_the_background_is_one_line(caplog):
    release = asyncio.Event()

    async def fails():
        try:
            await asyncio.Event().wait()
        finally:
            await release.wait()
            raise OSError("the sandbox is gone")

    cleanups = CancellableCode(None)
    caller = asyncio.create_task(cleanups.run(fails(), lambda: False))
    await asyncio.sleep(0.01)
    caller.cancel()
    await asyncio.wait({caller})
    release.set()
    await cleanups.wait()
    await asyncio.sleep(0)
    assert caplog.messages == ["rl-accel: clean-up of a cancelled response has failed: OSError: the sandbox is gone"]


async def test_results_and_errors_are_those_of_the_code():
    async def result():
        return 7

    async def error():
        raise OSError("gone")

    assert await CancellableCode(None).run(result(), lambda: False) == 7
    with pytest.raises(OSError, match="gone"):
        await CancellableCode(None).run(error(), lambda: False)
