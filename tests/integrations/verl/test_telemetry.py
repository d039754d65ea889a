"""Telemetry on verl: one flag has agent-loop workers note what their responses do, and the observer make numbers of it."""

import asyncio
import importlib.util
import json
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed", allow_module_level=True)

from rl_accel.errors import ConfigError
from rl_accel.features import TelemetryFlags
from rl_accel.integrations.verl import agent_loop, telemetry
from rl_accel.integrations.verl.telemetry import WORKER_PART, Observer, RecordingWorker, refuse_unwired, wire
from rl_accel.telemetry.server_counters import Reading
from rl_accel.telemetry.stage_clock import Response

ON = TelemetryFlags(enable=True)


@pytest.fixture
def config():
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", ["trainer.default_local_dir=/somewhere/run"])


def test_one_flag_sets_the_agent_loops_and_the_file_and_nothing_else(config):
    before = OmegaConf.to_container(config)
    wire(config, ON)
    after = OmegaConf.to_container(config)
    before["trainer"]["rl_accel_telemetry"] = "/somewhere/run/rl_accel_telemetry.jsonl"
    before["actor_rollout_ref"]["rollout"]["agent"]["agent_loop_manager_class"] = agent_loop.MANAGER
    before["trainer"]["rl_accel_agent_loop_parts"] = [WORKER_PART]
    assert after == before
    wire(config, ON)
    assert OmegaConf.to_container(config) == after, "a second time changes nothing"


def test_agent_loops_of_the_users_are_refused(config):
    OmegaConf.update(config, agent_loop.KEY, "mine.Manager", force_add=True)
    before = OmegaConf.to_container(config)
    with pytest.raises(
        ConfigError, match=r"rl_accel\.telemetry wants .*agent_loop_manager_class = None, found mine\.Manager"
    ):
        wire(config, ON)
    assert OmegaConf.to_container(config) == before


def test_a_trainer_that_nobody_wired_is_stopped(config):
    with pytest.raises(ConfigError, match=r"rl_accel_telemetry in the configuration of the trainer, found nothing"):
        refuse_unwired(config)


@pytest.mark.slow
def test_the_observer_is_there_while_the_feature_is_on(python):
    done = python("""
        import rl_accel
        rl_accel.enable(telemetry=True)
        assert rl_accel.status()["telemetry"].patches[0].state == "waiting"
        import verl.utils.tracking
        from rl_accel.telemetry import metrics
        assert rl_accel.status()["telemetry"].applied
        found = metrics.observed(1, {"timing_s/step": 4.0, "timing_s/gen": 3.0})
        assert found["rl_accel/telemetry/share/gen"] == 0.75 and found["rl_accel/telemetry/share/other"] == 0.25
        assert metrics.observed(1, {"val/acc": 1.0}) == {}
        rl_accel.disable()
        assert metrics.observed(1, {"timing_s/step": 4.0}) == {}
    """)
    assert done.returncode == 0, done.stderr


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


class TestedWorker(RecordingWorker, Worker):
    pass


def respond(worker, agent_name="plain", validate=False, uid="u", cancel_after=None):
    async def run():
        trajectory = {"validate": validate, "sample_index": 3}
        task = asyncio.create_task(worker._run_agent_loop({}, trajectory, agent_name=agent_name, uid=uid))
        if cancel_after is not None:
            await asyncio.sleep(cancel_after)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await worker.take_responses()

    return asyncio.run(run())


@pytest.fixture
def worker():
    return TestedWorker()


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
        return {response.prompt: response for response in await worker.take_responses()}

    found = asyncio.run(both())
    assert {uid: (note.outcome, note.tokens) for uid, note in found.items()} == {
        "plain": ("completed", 3),
        "broken": ("failed", None),
    }


@pytest.mark.slow
def test_notes_of_a_dead_worker_are_missing_and_the_step_goes_on(python, tmp_path, short_tmp):
    done = python(f"""
        import json, ray
        from types import SimpleNamespace
        from omegaconf import OmegaConf
        from rl_accel.integrations.verl.telemetry import Observer
        from rl_accel.telemetry.stage_clock import Response

        class Worker:
            def __init__(self, server):
                self.server = server
            def take_responses(self):
                return [Response("p", 10.0, 12.0, 13.0, 13.0, 20, self.server, "completed")]

        class Balancer:
            def get_all_servers(self):
                return ["gone:1", "gone:2"]

        def kill(actor, method):
            ray.kill(actor)  # which does not wait for the actor's end
            while True:
                try:
                    ray.get(getattr(actor, method).remote())
                except ray.exceptions.RayActorError:
                    return

        ray.init(address="local", num_cpus=2, include_dashboard=False, _temp_dir={str(short_tmp)!r})
        workers = [ray.remote(Worker).options(num_cpus=0).remote(name) for name in "ab"]
        balancer = ray.remote(Balancer).options(num_cpus=0).remote()
        config = OmegaConf.create({{
            "trainer": {{"use_v1": True, "v1": {{"trainer_mode": "sync"}},
                         "rl_accel_telemetry": {str(tmp_path / "kept.jsonl")!r}}},
            "actor_rollout_ref": {{"rollout": {{"name": "vllm", "max_num_seqs": 4}}}},
        }})
        observer = Observer(config, workers, SimpleNamespace(_load_balancer=balancer))
        timings = {{"timing_s/step": 8.0, "timing_s/gen": 4.0}}
        found = [observer(1, timings)]
        kill(workers[1], "take_responses")
        found += [observer(2, timings), observer(3, timings)]
        kill(balancer, "get_all_servers")
        kill(workers[0], "take_responses")
        found += [observer(4, timings)]
        print(json.dumps(found))
    """)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [numbers.get("telemetry/responses") for numbers in found] == [2, 1, 1, None]
    assert found[0]["telemetry/idle_share"] == 0.5
    assert all(numbers["telemetry/share/gen"] == 0.5 for numbers in found)
    assert not any("telemetry/preemptions" in numbers for numbers in found), "unknown is not zero"
    assert done.stderr.count("preemptions are unknown, http://gone:1/metrics") == 1
    assert done.stderr.count("notes of an agent-loop worker are missing") == 1
    kept = [json.loads(line) for line in (tmp_path / "kept.jsonl").read_text().splitlines()]
    assert [len(line["responses"]) for line in kept] == [2, 1, 1, 0]


@pytest.fixture
def observer_of(tmp_path):
    """``observer_of(trainer, fetch)``: an observer of a run without Ray."""

    def make(trainer, fetch, max_num_seqs=4):
        config = {
            "trainer": {**trainer, "rl_accel_telemetry": str(tmp_path / "kept.jsonl")},
            "actor_rollout_ref": {"rollout": {"name": "vllm", "max_num_seqs": max_num_seqs}},
        }
        observer = Observer(OmegaConf.create(config), [], SimpleNamespace())
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
    observer = observer_of(trainer, lambda: [Response("p", 10.0, 12.0, 13.0, 13.0, 20)])
    found = observer(1, {"timing_s/step": 8.0, "timing_s/gen": 4.0})
    assert found["telemetry/completion_p50_seconds"] == 3.0
    assert ("telemetry/idle_share" in found) == known


def test_slots_of_all_servers_limit_the_places_in_the_batch(observer_of):
    # Of 8 responses at once, the engines of both servers run at most 2 x 3: two wait for the others.
    responses = [Response("p", 0.0, 2.0, 2.0, 2.0, 20)] * 6 + [Response("p", 0.0, 4.0, 4.0, 4.0, 20)] * 2
    observer = observer_of({"use_v1": False}, lambda: responses, max_num_seqs=3)
    observer._servers = lambda: ["a", "b"]
    found = observer(1, {"timing_s/step": 8.0, "timing_s/gen": 4.0})
    assert found["telemetry/concurrency"] == 8
    assert found["telemetry/places"] == 3
    assert found["telemetry/idle_share"] == pytest.approx(1 - (6 * 2 + 2 * 2) / (6 * 4))


def test_a_file_that_cannot_be_written_costs_one_warning_and_no_number(observer_of, tmp_path, caplog):
    (tmp_path / "kept.jsonl").mkdir()
    observer = observer_of({"use_v1": False}, lambda: [Response("p", 10.0, 12.0, 13.0, 13.0, 20)])
    for step in (1, 2):
        assert observer(step, {"timing_s/step": 8.0, "timing_s/gen": 4.0})["telemetry/responses"] == 1
    assert caplog.text.count("responses cannot be kept for rl-accel profile") == 1


def test_servers_that_never_say_how_often_they_preempt_are_not_asked_for_ever(monkeypatch, observer_of):
    answers = [None, 4, 4, None, None, None, 9]
    asked = []

    def read(_engine, servers):
        asked.append(servers)
        said = answers.pop(0)
        return {"a": None if said is None else Reading(said)}

    monkeypatch.setattr(telemetry, "read_servers", read)
    observer = observer_of({}, list)
    observer._servers = lambda: ["a"]
    found = [observer(step, {"timing_s/step": 8.0, "timing_s/gen": 4.0}) for step in range(8)]
    assert [numbers.get("telemetry/preemptions") for numbers in found] == [None, None, 0.0, *[None] * 5]
    assert asked == [["a"]] * (3 + telemetry.ATTEMPTS)
