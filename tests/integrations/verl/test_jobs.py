"""Tests telemetry and drafts with real Ray actors. This process is the driver."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import ray
from omegaconf import OmegaConf

from rl_accel.features import DraftsFlags
from rl_accel.integrations.verl import drafts
from rl_accel.integrations.verl.telemetry import TelemetryObserver
from rl_accel.patches.verl import config_intake
from rl_accel.telemetry.stage_clock import ResponseTimes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("job")]

TIMINGS = {"timing_s/step": 8.0, "timing_s/gen": 4.0}


def start(kind, *args):
    return ray.remote(kind).options(num_cpus=0).remote(*args)


def configuration(max_num_seqs=4, **trainer):
    rollout = {"name": "vllm", "max_num_seqs": max_num_seqs}
    return OmegaConf.create({"trainer": trainer, "actor_rollout_ref": {"rollout": rollout}})


class Worker:
    def __init__(self, server):
        self.server = server

    def take_responses(self):
        return [ResponseTimes("p", 10.0, 12.0, 13.0, 13.0, 20, self.server, "completed")]


class Balancer:
    def get_all_servers(self):
        return ["gone:1", "gone:2"]


def test_notes_of_a_dead_worker_are_missing_and_the_step_goes_on(kill, tmp_path, caplog):
    workers, balancer = [start(Worker, name) for name in "ab"], start(Balancer)
    config = configuration(use_v1=True, v1={"trainer_mode": "sync"}, rl_accel_telemetry=str(tmp_path / "kept.jsonl"))
    observer = TelemetryObserver(config, workers, SimpleNamespace(_load_balancer=balancer))
    results = [observer(1, TIMINGS)]
    kill(workers[1])
    results += [observer(2, TIMINGS), observer(3, TIMINGS)]
    kill(balancer)
    kill(workers[0])
    results += [observer(4, TIMINGS)]

    assert [numbers.get("telemetry/responses") for numbers in results] == [2, 1, 1, None]
    assert results[0]["telemetry/idle_share"] == 0.5
    assert all(numbers["telemetry/share/gen"] == 0.5 for numbers in results)
    assert not any("telemetry/preemptions" in numbers for numbers in results), "unknown is not zero"
    assert caplog.text.count("preemptions are unknown, http://gone:1/metrics") == 1
    assert caplog.text.count("notes of an agent-loop worker are missing") == 1
    kept = [json.loads(line) for line in (tmp_path / "kept.jsonl").read_text().splitlines()]
    assert [len(line["responses"]) for line in kept] == [2, 1, 1, 0]


class DraftingServer:
    def begin(self):
        """Begin as a new process would, without history."""
        from rl_accel.drafts.drafter import Drafter

        ranks = {"rank": 0, "tensor_parallel_size": 1, "prefill_context_parallel_size": 1}
        config = SimpleNamespace(
            additional_config={"rl_accel_drafts": {"memory_mb": 1}},
            speculative_config=SimpleNamespace(num_speculative_tokens=8),
            parallel_config=SimpleNamespace(distributed_executor_backend="mp", **ranks),
        )
        self.drafter = Drafter(config)
        self.drafter._costs.allows = self.drafter._costs.pays = lambda *_: True

    async def collective_rpc(self, method, args):
        assert method == "exchange_drafts"
        self.drafter.absorb(args[0])
        return [(self.drafter.take_finished(), self.drafter.take_counts())]

    async def respond(self, prompt, tokens):
        """Return the number of tokens that were drafted for a response of these."""
        tokens, matrix, drafted = [*prompt, *tokens], np.zeros((1, 100), np.int32), 0
        matrix[0, : len(tokens)] = tokens
        for end in range(len(prompt) + 1, len(tokens) + 1):
            (draft,) = self.drafter.propose([[tokens[end - 1]]], np.array([end]), matrix)
            drafted += len(draft)
        self.drafter.new_weights()
        return drafted


def test_replicas_and_resumed_runs_have_what_others_finished(tmp_path, monkeypatch):
    servers = [start(DraftingServer) for _ in range(2)]

    def run(**trainer):
        """Begin a run; return ``log(step)``, which shows the step to the run's exchange and waits until that is over."""
        ray.get([server.begin.remote() for server in servers])
        keys = {"default_local_dir": str(tmp_path), "resume_mode": "auto", "resume_from_path": None, **trainer}
        replicas = [SimpleNamespace(server_handle=server) for server in servers]
        manager = SimpleNamespace(get_replicas=lambda: replicas)
        trainer = SimpleNamespace(config=OmegaConf.create({"trainer": keys}), llm_server_manager=manager)
        monkeypatch.setattr(config_intake._process, "trainer", lambda: trainer)
        exchange = drafts.Exchange(DraftsFlags(enable=True, save=True))

        def log(step):
            numbers = exchange(step, TIMINGS)
            ray.wait(list(exchange._calls.values()), num_returns=len(exchange._calls), timeout=60)
            return numbers

        return log

    def respond(server, tokens):
        return ray.get(servers[server].respond.remote([1, 2, 3], tokens))

    story, log = [*range(100, 140)], run()
    respond(0, story)
    assert set(log(1).values()) == {0.0}
    assert log(2)["drafts/tokens_an_engine_step"] == 1.0
    elsewhere = respond(1, story)
    assert elsewhere > 20
    (tmp_path / "global_step_3").mkdir()
    assert 0 < log(3)["drafts/drafted"] <= elsewhere, "with the last answers"

    log = run()
    assert respond(0, story[:20]) == 0, "it is fresh"
    log(4)
    assert min(respond(server, story) for server in (0, 1)) > 20
    (tmp_path / "global_step_5").mkdir()
    log(5)

    log = run(resume_mode="resume_path", resume_from_path=str(tmp_path / "global_step_5"))
    log(1)
    assert respond(1, story) > 20
