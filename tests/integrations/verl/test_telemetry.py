"""Tests telemetry on verl: agent-loop workers note what their responses do, and the observer calculates the metrics."""

import asyncio
from types import SimpleNamespace
from unittest import mock

import pytest
from omegaconf import OmegaConf
from verl.workers.rollout.llm_server import LLMServerClient

import rl_accel
from rl_accel.integrations.verl import telemetry
from rl_accel.integrations.verl.telemetry import RecordingWorker, TelemetryObserver
from rl_accel.telemetry.server_counters import Reading
from rl_accel.telemetry.stage_clock import ResponseTimes


class Worker:
    """What verl's worker does to a response, as far as it matters here."""

    def __init__(self):
        balancer = mock.Mock()  # it has one server and asks for no fields of a request
        balancer.acquire_server.remote = mock.AsyncMock(return_value=("server-7", object()))
        balancer.require_acquire_fields.remote = mock.AsyncMock(return_value=())
        balancer.require_release_fields.remote = mock.AsyncMock(return_value=())
        self.llm_client = LLMServerClient(None, balancer)

    async def _run_agent_loop(self, sampling_params, trajectory, *, agent_name, **kwargs):
        await self.llm_client._acquire_server("request")
        await asyncio.sleep(0.02)
        if agent_name == "broken":
            raise RuntimeError("no")
        output = SimpleNamespace(response_mask=[1, 1, 0, 1], metrics=SimpleNamespace(tool_calls=0.5))
        return await self._agent_loop_postprocess(output, trajectory["validate"], **kwargs)

    async def _agent_loop_postprocess(self, output, validate, **kwargs):
        await self._compute_score([output], kwargs=kwargs)
        await asyncio.sleep(0.02)

    async def _compute_score(self, outputs, kwargs):
        await asyncio.sleep(0.02)


class TestedWorker(RecordingWorker, Worker):
    pass


async def respond(worker, agent_name="plain", validate=False, cancel_after=None):
    trajectory = {"validate": validate, "sample_index": 3, "step": 1}
    task = asyncio.create_task(worker._run_agent_loop({}, trajectory, agent_name=agent_name, uid="u"))
    if cancel_after is not None:
        await asyncio.sleep(cancel_after)
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return await worker.take_responses()


@pytest.fixture
def worker():
    rl_accel.enable(telemetry=True)
    yield TestedWorker()
    rl_accel.disable()


async def test_off_means_that_no_server_is_noted_any_more(worker):
    assert [note.server for note in await respond(worker)] == ["server-7"]
    rl_accel.disable()
    assert [note.server for note in await respond(worker)] == [None]
    assert not hasattr(LLMServerClient._acquire_server, "__wrapped__")


async def test_a_response_that_completes(worker):
    (note,) = await respond(worker)
    assert (note.prompt, note.server, note.tokens, note.outcome, note.tools) == ("u", "server-7", 3, "completed", 0.5)
    assert note.generated - note.began > 0.01
    assert note.rewarded - note.generated > 0.01
    assert note.ended - note.rewarded > 0.01
    assert await respond(worker, validate=True) == [], "fetched notes are gone, and validation is not noted"


async def test_a_response_that_fails_or_is_cancelled(worker):
    (failed,) = await respond(worker, agent_name="broken")
    (cancelled,) = await respond(worker, cancel_after=0.005)
    (late,) = await respond(worker, cancel_after=0.03)
    assert [note.outcome for note in (failed, cancelled, late)] == ["failed", "cancelled", "cancelled"]
    assert failed.generated is cancelled.generated is cancelled.tokens is None
    assert late.generated is not None
    assert late.rewarded is None


async def test_responses_at_once_do_not_mix(worker):
    trajectory = {"validate": False, "sample_index": 0, "step": 1}
    runs = [worker._run_agent_loop({}, trajectory, agent_name=name, uid=name) for name in ("plain", "broken")]
    await asyncio.gather(*runs, return_exceptions=True)
    result = {note.prompt: (note.outcome, note.tokens) for note in await worker.take_responses()}
    assert result == {"plain": ("completed", 3), "broken": ("failed", None)}


@pytest.fixture
def observer_of(tmp_path):
    """``observer_of(trainer, fetch)``: an observer of a run without Ray."""

    def make(trainer, fetch, max_num_seqs=4):
        trainer = {**trainer, "rl_accel_telemetry": str(tmp_path / "kept.jsonl")}
        rollout = {"name": "vllm", "max_num_seqs": max_num_seqs}
        config = OmegaConf.create({"trainer": trainer, "actor_rollout_ref": {"rollout": rollout}})
        observer = TelemetryObserver(config, [], SimpleNamespace())
        observer._fetch = fetch
        return observer

    return make


@pytest.mark.parametrize(
    ("trainer", "known"),
    [
        ({"use_v1": False}, True),
        ({"use_v1": True, "v1": {"trainer_mode": "sync", "sync": {"parameter_sync_step": 1}}}, True),
        ({"use_v1": True, "v1": {"trainer_mode": "sync", "sync": {"parameter_sync_step": 2}}}, False),
        ({"use_v1": True, "v1": {"trainer_mode": "tail_batching", "tail_batching": {"prompt_ratio": 1.25}}}, True),
        ({"use_v1": True, "v1": {"trainer_mode": "colocate_async"}}, False),
    ],
)
def test_parts_of_generation_are_told_only_where_it_begins_with_its_stage(trainer, known, observer_of):
    observer = observer_of(trainer, lambda: [ResponseTimes("p", 10.0, 12.0, 13.0, 13.0, 20)])
    metrics = observer(1, {"timing_s/step": 8.0, "timing_s/gen": 4.0})
    assert (metrics["telemetry/completion_p50_seconds"], "telemetry/idle_share" in metrics) == (3.0, known)


def test_a_response_that_ends_before_its_step_counts_in_its_step(observer_of):
    ended = [ResponseTimes("p", 0.0, 2.0, 2.0, 2.0, 20, step=1), ResponseTimes("q", 1.0, 2.0, 2.0, 2.0, 7, step=2)]
    fetched = [ended, [ResponseTimes("q", 1.0, 5.0, 5.0, 5.0, 9, step=2)]]
    observer = observer_of({"use_v1": False}, lambda: fetched.pop(0))
    metrics = [observer(step, {"timing_s/step": 8.0, "timing_s/gen": 4.0}) for step in (1, 2)]
    assert [numbers["telemetry/tokens"] for numbers in metrics] == [20, 16]


def test_slots_of_all_servers_limit_the_places_in_the_batch(observer_of):
    # Of 8 responses at once, the engines of both servers run at most 2 x 3: two wait for the others.
    responses = [ResponseTimes("p", 0.0, 2.0, 2.0, 2.0, 20)] * 6 + [ResponseTimes("p", 0.0, 4.0, 4.0, 4.0, 20)] * 2
    observer = observer_of({"use_v1": False}, lambda: responses, max_num_seqs=3)
    observer._servers = lambda: ["a", "b"]
    metrics = observer(1, {"timing_s/step": 8.0, "timing_s/gen": 4.0})
    assert (metrics["telemetry/concurrency"], metrics["telemetry/slots"]) == (8, 3)
    assert metrics["telemetry/idle_share"] == pytest.approx(1 - (6 * 2 + 2 * 2) / (6 * 4))


def test_a_file_that_cannot_be_written_costs_one_warning_and_no_number(observer_of, tmp_path, caplog):
    (tmp_path / "kept.jsonl").mkdir()
    observer = observer_of({"use_v1": False}, lambda: [ResponseTimes("p", 10.0, 12.0, 13.0, 13.0, 20)])
    for step in (1, 2):
        assert observer(step, {"timing_s/step": 8.0, "timing_s/gen": 4.0})["telemetry/responses"] == 1
    assert caplog.text.count("responses cannot be kept for rl-accel profile") == 1


def test_servers_that_never_say_how_often_they_preempt_are_not_asked_for_ever(monkeypatch, observer_of):
    answers, asked = [None, 4, 4, None, None, None, 9], []

    def read(_engine, servers):
        asked.append(servers)
        said = answers.pop(0)
        return {"a": None if said is None else Reading(said)}

    monkeypatch.setattr(telemetry, "read_servers", read)
    observer = observer_of({}, list)
    observer._servers = lambda: ["a"]
    results = [observer(step, {"timing_s/step": 8.0, "timing_s/gen": 4.0}) for step in range(8)]
    assert [numbers.get("telemetry/preemptions") for numbers in results] == [None, None, 0.0, *[None] * 5]
    assert asked == [["a"]] * (3 + telemetry.ATTEMPTS)
