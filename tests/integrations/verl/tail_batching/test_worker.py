"""Tests an agent-loop worker at the end of a round, in this process and with a stand-in for verl's part."""

import asyncio
from unittest import mock

import pytest
import transfer_queue
from omegaconf import OmegaConf
from ray.exceptions import RayTaskError

import rl_accel
from rl_accel.errors import ConfigError
from rl_accel.integrations.verl.tail_batching.messages import StoredKeys
from rl_accel.integrations.verl.tail_batching.worker import TailAgentLoopWorker
from rl_accel.integrations.verl.tail_batching.worker_servers import SESSION
from rl_accel.rollout.round_driver import Event, Job

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "calculate_log_probs": True}
ROLLOUT = {**SAMPLING, "agent": {"default_agent_loop": "any"}}
CONFIG = OmegaConf.create({"algorithm": {}, "actor_rollout_ref": {"rollout": ROLLOUT}})


class VerlWorker:
    """What the worker uses of verl's. Responses of prompt "writing" write until ``written``, others generate until ``stopped``."""

    def __init__(self):
        self.config, self.reward_loop_worker_handles, self.background_tasks = CONFIG, None, set()
        self.stopped, self.written, self.write_fails = asyncio.Event(), asyncio.Event(), None
        self.may_close, self.closed = asyncio.Event(), []

    async def _run_agent_loop(self, sampling_params, uid, **_):
        session = SESSION.get()
        if uid == "writing":
            session.keys, session.storing = (f"{uid}_{session.response_id}_0",), True
            session.limit.reschedule(None)
            await self.written.wait()
            if self.write_fails:
                raise self.write_fails
            return
        session.generating = uid != "tool"
        try:
            await self.stopped.wait()
            session.generating, session.tokens = False, 3
            if session.cancelled:
                session.interrupt()
        finally:
            session.generating = False
            if uid.startswith("sandbox"):
                await self.may_close.wait()
                self.closed.append(uid)

    async def _compute_teacher_logprobs(self):
        pass


class Worker(TailAgentLoopWorker, VerlWorker):
    pass


@pytest.fixture(autouse=True)
def flags_of_the_job():
    """The flags that the plug-in reads in a worker's process."""
    rl_accel.enable(tail_batching={"cleanup_limit": None})


@pytest.fixture(autouse=True)
def events_wait_for_ever(monkeypatch):
    """Unless something ends the wait for more events, and the test would never end."""
    monkeypatch.setattr(f"{TailAgentLoopWorker.__module__}.GATHER_SHARE", 1e9)
    monkeypatch.setattr(f"{TailAgentLoopWorker.__module__}.GATHER_SECONDS", 1e9)


@pytest.fixture
def cleared(monkeypatch):
    """What would clear keys of TransferQueue."""
    monkeypatch.setattr(transfer_queue, "async_kv_clear", mock.AsyncMock())
    return transfer_queue.async_kv_clear


async def start(write_fails=None):
    """Return a worker whose responses 0 to 39 generate and 40 to 49 write."""
    worker = Worker()
    worker.write_fails = write_fails
    await worker.act([Job("generating", {}, tuple(range(40)), 1), Job("writing", {}, tuple(range(40, 50)), 1)], ())
    while not all(session.generating or session.storing for session in worker._sessions.values()):
        await asyncio.sleep(0)
    return worker


async def test_all_that_is_cancelled_at_the_end_of_a_round_is_one_message_and_nothing_is_cleared_one_by_one(cleared):
    worker = await start()
    await worker.act((), range(50), engines_stop=True)
    message = asyncio.create_task(worker.next_events())
    worker.stopped.set()
    while len(worker._sessions) > 10:
        await asyncio.sleep(0)
    assert not message.done(), "what still writes is waited for"
    worker.written.set()
    assert sorted(await message, key=lambda event: event.response_id) == [
        *(Event("aborted", response_id, 3) for response_id in range(40)),
        *(Event("aborted", response_id, 0, StoredKeys((f"writing_{response_id}_0",))) for response_id in range(40, 50)),
    ]
    cleared.assert_not_called()


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_write_that_fails_leaves_its_keys_to_the_trainer(cleared, cancelled):
    worker = await start(write_fails=OSError("storage is full"))
    await worker.act((), range(50) if cancelled else range(40), engines_stop=True)
    worker.stopped.set()
    worker.written.set()
    events = [event for event in await worker.next_events() if event.response_id >= 40]
    assert {event.kind for event in events} == {"aborted" if cancelled else "failed"}
    assert sorted(event.result.keys for event in events) == [(f"writing_{number}_0",) for number in range(40, 50)]
    cleared.assert_not_called()


async def test_an_error_of_the_configuration_in_a_reward_worker_ends_the_run():
    cause = ConfigError("rl_accel.reward_timeout.grader wants a function, found 'a.b'")
    words = "ray::RewardLoopWorker.compute_score() (pid=7)"
    report = RayTaskError("compute_score", words, cause, proctitle="ray::", pid=7, ip="127.0.0.1")
    worker = await start(write_fails=report.as_instanceof_cause())
    worker.stopped.set()
    worker.written.set()
    failed = [event for event in await worker.next_events() if event.kind == "failed"]
    assert {(event.ends_run, event.error) for event in failed} == {(True, str(cause))}


async def test_while_responses_run_events_wait_for_more():
    worker = await start()
    message = asyncio.create_task(worker.next_events())
    worker.written.set()
    while len(worker._sessions) > 40:
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    assert not message.done()
    worker.stopped.set()
    assert len(await message) == 50


async def test_an_agent_loop_that_is_over_its_limit_fails_and_one_that_already_writes_does_not():
    worker = Worker()
    worker._limit = 0.01
    await worker.act([Job("writing", {}, (0,), 1), Job("tool", {}, (1,), 1), Job("generating", {}, (2,), 1)], ())
    while not worker._sessions[2].generating:
        await asyncio.sleep(0)
    assert worker.outside_engines() == [1]
    while len(worker._sessions) > 1:
        await asyncio.sleep(0)
    worker.written.set()
    events = {event.response_id: event for event in await worker.next_events()}
    assert events[0].kind == "scored"
    for number in (1, 2):
        assert events[number].kind == "failed"
        assert events[number].error == "TimeoutError: its agent loop was not over after 0.01 s (agent_loop_limit)"


@pytest.mark.parametrize("engines_stop", [False, True])
async def test_a_sandbox_is_closed_in_the_background_and_neither_round_nor_next_round_waits(engines_stop):
    worker = Worker()
    await worker.act([Job("sandbox", {}, (0,), 1)], ())
    while not worker._sessions[0].generating:
        await asyncio.sleep(0)
    await worker.act((), [0], engines_stop)
    if engines_stop:
        worker.stopped.set()  # the engine answers with what it has, and the agent loop is told to end there
    async with asyncio.timeout(60):
        assert [event.kind for event in await worker.next_events()] == ["aborted"]
    assert worker.closed == []
    cleaned_up = asyncio.create_task(worker.cleaned_up())
    await worker.act([Job("writing", {}, (1,), 2)], ())
    worker.written.set()
    async with asyncio.timeout(60):
        assert [event.kind for event in await worker.next_events()] == ["scored"]
    assert not cleaned_up.done()
    worker.may_close.set()
    await cleaned_up
    assert worker.closed == ["sandbox"]


async def test_what_is_over_writes_nothing_more():
    worker = Worker()
    await worker.act([Job("tool", {}, (0,), 1)], ())
    session = worker._sessions[0]
    while worker.outside_engines() != [0] or session.limit is None:
        await asyncio.sleep(0)
    await worker.act((), [0])
    SESSION.set(session)
    with pytest.raises(asyncio.CancelledError):
        await worker._compute_teacher_logprobs()
    assert not session.storing
    SESSION.set(None)
