"""The observer fetches notes from real actors; one that is dead takes its own notes with it and nothing else."""

import json

import pytest

pytest.importorskip("ray")

from rl_accel.telemetry.server_counters import Reading

pytestmark = pytest.mark.slow


def test_notes_of_a_dead_worker_are_missing_and_the_step_goes_on(python, tmp_path, short_tmp):
    done = python(f"""
        import json, logging, ray
        from types import SimpleNamespace
        from omegaconf import OmegaConf
        from rl_accel.integrations.verl.telemetry.observer import Observer
        from rl_accel.telemetry.responses import Response, NAMES

        class Worker:
            def __init__(self, server):
                self.server = server
            def take_responses(self):
                return [("p", 10.0, 12.0, 13.0, 13.0, 20, self.server, "completed")]

        class Balancer:
            def get_all_servers(self):
                return ["gone:1", "gone:2"]

        warnings = []
        class Handler(logging.Handler):
            def emit(self, record):
                warnings.append(record.getMessage())
        logging.getLogger("rl_accel").addHandler(Handler())

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
                         "rl_accel_telemetry": {{"file": {str(tmp_path / "kept.jsonl")!r}}}}},
            "actor_rollout_ref": {{"rollout": {{"name": "vllm", "max_num_seqs": 4}}}},
        }})
        observer = Observer()
        observer.attach(config, workers, SimpleNamespace(_load_balancer=balancer))
        timings = {{"timing_s/step": 8.0, "timing_s/gen": 4.0}}
        found = [observer(1, timings)]
        kill(workers[1], "take_responses")
        found += [observer(2, timings), observer(3, timings)]
        kill(balancer, "get_all_servers")
        kill(workers[0], "take_responses")
        found += [observer(4, timings)]
        print(json.dumps([found, warnings]))
    """)
    assert done.returncode == 0, done.stderr
    found, warnings = json.loads(done.stdout.splitlines()[-1])
    assert [numbers.get("telemetry/responses") for numbers in found] == [2, 1, 1, None]
    assert found[0]["telemetry/idle_share"] == 0.5
    assert all(numbers["telemetry/share/gen"] == 0.5 for numbers in found)
    assert not any("telemetry/preemptions" in numbers for numbers in found), "unknown is not zero"
    assert len(warnings) == 2
    assert "preemptions are unknown, http://gone:" in warnings[0]
    assert "notes of an agent-loop worker are missing" in warnings[1]
    kept = [json.loads(line) for line in (tmp_path / "kept.jsonl").read_text().splitlines()]
    assert [len(line["responses"]) for line in kept] == [2, 1, 1, 0]
    assert [line["slots"] for line in kept] == [8, 8, 8, None]


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
def test_parts_of_generation_are_told_only_where_it_begins_with_its_stage(trainer, known):
    from types import SimpleNamespace

    from omegaconf import OmegaConf

    from rl_accel.integrations.verl.telemetry.observer import Observer
    from rl_accel.telemetry.responses import Response

    rollout = {"name": "vllm", "max_num_seqs": 4}
    observer = Observer()
    observer.attach(
        OmegaConf.create({"trainer": trainer, "actor_rollout_ref": {"rollout": rollout}}), [], SimpleNamespace()
    )
    observer._fetch = lambda: [Response("p", 10.0, 12.0, 13.0, 13.0, 20)]
    found = observer(1, {"timing_s/step": 8.0, "timing_s/gen": 4.0})
    assert found["telemetry/completion_p50_seconds"] == 3.0
    assert ("telemetry/idle_share" in found) == known


def test_servers_that_never_say_how_often_they_preempt_are_not_asked_for_ever(monkeypatch):
    from types import SimpleNamespace

    from omegaconf import OmegaConf

    from rl_accel.integrations.verl.telemetry import observer as module

    answers = [None, 4, 4, None, None, None, 9]
    asked = []

    def read(_engine, servers):
        asked.append(servers)
        said = answers.pop(0)
        return {"a": None if said is None else Reading(said)}

    monkeypatch.setattr(module, "read_servers", read)
    observer = module.Observer()
    observer.attach(
        OmegaConf.create({"trainer": {}, "actor_rollout_ref": {"rollout": {"name": "any"}}}), [], SimpleNamespace()
    )
    observer._servers = lambda: ["a"]
    found = [observer(step, {"timing_s/step": 8.0, "timing_s/gen": 4.0}) for step in range(8)]
    assert [numbers.get("telemetry/preemptions") for numbers in found] == [None, None, 0.0, *[None] * 5]
    assert asked == [["a"]] * (3 + module.ATTEMPTS)
