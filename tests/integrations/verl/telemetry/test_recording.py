"""Workers note what their responses do, whatever becomes of them, and validation is none of their business."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from rl_accel.integrations.verl.telemetry.recording import Recording
from rl_accel.telemetry.responses import Response


class Client:
    async def _acquire_server(self, request_id, **extra):
        return "server-7", object()


class Worker:
    """What verl's worker does to a response, as far as it matters here."""

    def __init__(self):
        self.llm_client = Client()

    async def _run_agent_loop(self, sampling_params, trajectory, *, agent_name, **kwargs):
        await self.llm_client._acquire_server("request")
        await asyncio.sleep(0.02)
        if agent_name == "broken":
            raise RuntimeError("no")
        output = SimpleNamespace(response_mask=[1, 1, 0, 1])
        return await self._agent_loop_postprocess(output, trajectory["validate"], **kwargs)

    async def _agent_loop_postprocess(self, output, validate, **kwargs):
        await self._compute_score([output], kwargs=kwargs)
        await asyncio.sleep(0.02)

    async def _compute_score(self, outputs, kwargs):
        await asyncio.sleep(0.02)


class RecordingWorker(Recording, Worker):
    pass


def respond(worker, agent_name="plain", validate=False, uid="u", cancel_after=None):
    async def run():
        trajectory = {"validate": validate, "sample_index": 3}
        task = asyncio.create_task(worker._run_agent_loop({}, trajectory, agent_name=agent_name, uid=uid))
        if cancel_after is not None:
            await asyncio.sleep(cancel_after)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return [Response(*row) for row in await worker.take_responses()]

    return asyncio.run(run())


@pytest.fixture
def worker():
    return RecordingWorker()


def test_a_response_that_completes(worker):
    (note,) = respond(worker)
    assert (note.prompt, note.server, note.tokens, note.outcome) == ("u", "server-7", 3, "completed")
    assert note.generated - note.began > 0.01
    assert note.rewarded - note.generated > 0.01
    assert note.ended - note.rewarded > 0.01
    assert respond(worker, validate=True) == [], "fetched notes are gone, and validation is not noted"


def test_a_response_that_fails_or_is_cancelled(worker):
    (failed,) = respond(worker, agent_name="broken")
    (cancelled,) = respond(worker, cancel_after=0.005)
    (late,) = respond(worker, cancel_after=0.03)
    assert [note.outcome for note in (failed, cancelled, late)] == ["failed", "cancelled", "cancelled"]
    assert failed.generated is cancelled.generated is cancelled.tokens is None
    assert late.generated is not None
    assert late.rewarded is None


def test_responses_at_once_do_not_mix(worker):
    async def both():
        runs = [
            worker._run_agent_loop({}, {"validate": False, "sample_index": 0}, agent_name=name, uid=name)
            for name in ("plain", "broken")
        ]
        await asyncio.gather(*runs, return_exceptions=True)
        return {row[0]: Response(*row) for row in await worker.take_responses()}

    found = asyncio.run(both())
    assert {uid: (note.outcome, note.tokens) for uid, note in found.items()} == {
        "plain": ("completed", 3),
        "broken": ("failed", None),
    }
