"""Drafts on verl: what is chosen in its configuration, what is refused, the router, and what is said of the numbers."""

import json
from collections import Counter

import pytest
from omegaconf import OmegaConf

from rl_accel.errors import ConfigError
from rl_accel.features import DraftsFlags
from rl_accel.integrations.verl import drafts
from rl_accel.telemetry import metrics

ROLLOUT = {
    "name": "vllm",
    "mtp": {"enable": False, "enable_rollout": False},
    "engine_kwargs": {"vllm": {"kv_cache_memory_bytes": 100}},
}


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    monkeypatch.setattr(drafts, "_vllm_version", lambda: "0.29.0")


def config(**rollout):
    made = OmegaConf.create({"trainer": {"use_v1": True}, "actor_rollout_ref": {"rollout": {**ROLLOUT, **rollout}}})
    OmegaConf.set_struct(made, True)
    return made


def test_wiring_is_put_into_the_configuration_once():
    made = config()
    drafts.wire(made, DraftsFlags(enable=True, max_tokens=5))
    rollout = made.actor_rollout_ref.rollout
    assert rollout.engine_kwargs.vllm.kv_cache_memory_bytes == 100
    assert rollout.engine_kwargs.vllm.speculative_config.num_speculative_tokens == 5
    settings = rollout.engine_kwargs.vllm.additional_config.rl_accel_drafts
    assert DraftsFlags(**settings) == DraftsFlags(enable=True, max_tokens=5)
    before = OmegaConf.to_container(made)
    drafts.wire(made, DraftsFlags(enable=True, max_tokens=5))
    assert OmegaConf.to_container(made) == before
    drafts.refuse_unwired(made)


@pytest.mark.parametrize(
    ("rollout", "own", "executor"),
    [
        ({}, None, drafts.ONE_PROCESS),
        ({"tensor_model_parallel_size": 1, "data_parallel_size": 1}, None, drafts.ONE_PROCESS),
        ({"tensor_model_parallel_size": 1}, "mp", "mp"),
        ({"tensor_model_parallel_size": 2}, None, None),
        ({"data_parallel_size": 2}, None, None),
    ],
)
def test_an_engine_of_one_device_is_one_process_unless_the_user_says_otherwise(rollout, own, executor):
    made = config(**rollout, engine_kwargs={"vllm": {"distributed_executor_backend": own}})
    drafts.wire(made, DraftsFlags(enable=True))
    assert made.actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend == executor


def test_a_trainer_that_nobody_has_wired_is_refused():
    with pytest.raises(ConfigError, match="validate_config sets it"):
        drafts.refuse_unwired(config())


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ({"name": "sglang"}, r"rollout.name = vllm, found sglang"),
        ({"mtp": {"enable": True, "enable_rollout": True}}, r"rollout.mtp.enable_rollout = False, found True"),
        ({"router_config_path": "own.yaml"}, r"router_config_path = None, found own.yaml"),
        (
            {"engine_kwargs": {"vllm": {"speculative_config": {"method": "ngram"}}}},
            r"speculative_config = None, found \{'method': 'ngram'\}",
        ),
    ],
)
def test_what_cannot_go_together_is_refused_with_its_key(rollout, said):
    with pytest.raises(ConfigError, match=said):
        drafts.wire(config(**rollout), DraftsFlags(enable=True))


@pytest.mark.parametrize("version", [None, "0.30.0"])
def test_a_vllm_that_was_not_tried_is_refused(monkeypatch, version):
    monkeypatch.setattr(drafts, "_vllm_version", lambda: version)
    with pytest.raises(ConfigError, match=rf"vLLM = 0\.29\.0, found {version}"):
        drafts.wire(config(), DraftsFlags(enable=True))


@pytest.mark.slow
def test_responses_of_a_prompt_share_a_replica_unless_that_unbalances_them():
    from rl_accel.integrations.verl.drafts.router import MARGIN, SiblingRouter

    servers = {f"s{i}": f"handle {i}" for i in range(4)}
    router = SiblingRouter(servers, {})
    prompts = [[prompt, 7, 9] for prompt in range(40)]

    def acquire(request_id, prompt):
        return router.acquire_server(request_id, prompt_ids=prompt)[0]

    first = {prompt[0]: acquire(f"a{prompt[0]}", prompt) for prompt in prompts}
    assert set(Counter(first.values()).values()) == {10}, "new prompts go to the emptiest replica"
    assert {prompt[0]: acquire(f"b{prompt[0]}", prompt) for prompt in reversed(prompts)} == first
    for prompt in (*prompts, *prompts):
        router.release_server(first[prompt[0]])

    same = Counter(acquire(f"c{i}", prompts[0]) for i in range(40))
    assert max(same.values()) - min(same.values()) <= MARGIN + 1
    assert same.most_common(1)[0][0] == first[0]
    assert acquire("c0", prompts[1]) == acquire("c0", prompts[2]), "a conversation stays where it began"
    router.remove_servers([first[0]])
    assert acquire("d", prompts[0]) in router.get_all_servers()
    with pytest.raises(RuntimeError, match="No available servers"):
        SiblingRouter({}).acquire_server("x", prompt_ids=[1])


def test_the_first_steps_are_compared_with_the_trainer():
    drafts.check({})
    drafts.check({"training/rollout_probs_diff_mean": 0.01})
    for wrong in (0.2, float("nan")):
        with pytest.raises(metrics.StopTraining, match="train without drafts"):
            drafts.check({"training/rollout_probs_diff_mean": wrong})


def test_an_observer_may_stop_the_training():
    def stop(_step, logged):
        drafts.check(logged)
        return {}

    metrics.observe("drafts", stop)
    try:
        assert metrics.observed(1, {}) == {}
        with pytest.raises(metrics.StopTraining):
            metrics.observed(2, {"training/rollout_probs_diff_mean": 1.0})
    finally:
        metrics.observe("drafts", None)


def test_numbers_of_a_step():
    counted = {"steps": 10, "tokens": 60, "drafted": 40, "accepted": 30, "accepted_sibling": 20, "drafted_sibling": 22}
    counted |= {"tokens_from_16": 20, "row_steps_from_16": 20, "tokens_from_32": 40, "row_steps_from_32": 10}
    found = drafts.numbers(Counter(counted))
    assert found["drafts/acceptance"] == 0.75
    assert found["drafts/acceptance_sibling"] == 20 / 22
    assert found["drafts/tokens_a_step"] == 2.0
    assert found["drafts/tokens_an_engine_step"] == 6.0
    assert found["drafts/tokens_a_step_from_32"] == 4.0
    assert found["drafts/accepted_sibling"] == 20
    assert found["drafts/drafted_own"] == 0
    assert "drafts/acceptance_own" not in found
    assert set(drafts.numbers(Counter()).values()) == {0.0}


EXCHANGE = """
import json, os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import ray
from omegaconf import OmegaConf

from rl_accel.features import DraftsFlags
from rl_accel.integrations.verl import drafts
from rl_accel.patches.verl import config_intake

ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=100_000_000, _temp_dir=os.environ["RAY_TEMP"])
FLAGS = DraftsFlags(enable=True, save=True)
ROOT = Path(os.environ["CHECKPOINTS"])


@ray.remote(num_cpus=0)
class Server:
    async def begin(self):
        from rl_accel.drafts.drafter import Drafter

        parallel = dict(distributed_executor_backend="mp", rank=0, tensor_parallel_size=1, prefill_context_parallel_size=1)
        self.drafter = Drafter(
            SimpleNamespace(
                additional_config={"rl_accel_drafts": {"memory_mb": 1}},
                speculative_config=SimpleNamespace(num_speculative_tokens=8),
                parallel_config=SimpleNamespace(**parallel),
            )
        )
        self.drafter._worth.allows = self.drafter._worth.pays = lambda *_: True

    async def collective_rpc(self, method, args):
        assert method == "exchange_drafts"
        self.drafter.absorb(args[0])
        return [(self.drafter.take_finished(), self.drafter.take_counts())]

    async def respond(self, prompt, tokens):
        tokens, matrix, drafted = [*prompt, *tokens], np.zeros((1, 100), np.int32), 0
        matrix[0, : len(tokens)] = tokens
        for end in range(len(prompt) + 1, len(tokens) + 1):
            (draft,) = self.drafter.propose([[tokens[end - 1]]], np.array([end]), matrix)
            drafted += len(draft)
        self.drafter.new_weights()
        return drafted


class Trainer:
    config = OmegaConf.create(
        {"trainer": {"default_local_dir": str(ROOT), "resume_mode": "auto", "resume_from_path": None}}
    )

    servers = [Server.remote() for _ in range(2)]

    def __init__(self):
        ray.get([server.begin.remote() for server in self.servers])  # as new processes would, without history
        self.llm_server_manager = self
        self.exchange = drafts.Exchange(FLAGS)

    def get_replicas(self):
        return [SimpleNamespace(server_handle=server) for server in self.servers]

    def log(self, step):
        config_intake._trainer = lambda: self
        numbers = self.exchange(step, {"timing_s/gen": 1.0})
        for call in self.exchange._calls.values():
            ray.wait([call])
        return numbers

    def respond(self, server, *what):
        return ray.get(self.servers[server].respond.remote(*what))


story = [*range(100, 140)]
said = {}
first = Trainer()
first.respond(0, [1, 2, 3], story)
said["before"] = first.log(1)
said["known here"] = first.log(2)["drafts/tokens_an_engine_step"]
said["elsewhere"] = first.respond(1, [1, 2, 3], story)
(ROOT / "global_step_3").mkdir()
said["with the last answers"] = first.log(3)["drafts/drafted"]
second = Trainer()
said["fresh"] = second.respond(0, [1, 2, 3], story[:20])
second.log(4)
said["resumed"] = [second.respond(server, [1, 2, 3], story) for server in (0, 1)]
(ROOT / "global_step_5").mkdir()
second.log(5)
Trainer.config.trainer.resume_mode = "resume_path"
Trainer.config.trainer.resume_from_path = str(ROOT / "global_step_5")
third = Trainer()
third.log(1)
said["resumed by path"] = third.respond(1, [1, 2, 3], story)
print(json.dumps(said))
"""


@pytest.mark.slow
def test_replicas_and_resumed_runs_have_what_others_finished(python, short_tmp, tmp_path):
    pytest.importorskip("ray")
    done = python(EXCHANGE, RAY_TEMP=str(short_tmp), CHECKPOINTS=str(tmp_path))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert set(said["before"].values()) == {0.0}
    assert said["known here"] == 1.0
    assert said["elsewhere"] > 20
    assert 0 < said["with the last answers"] <= said["elsewhere"]
    assert said["fresh"] == 0
    assert min(said["resumed"]) > 20
    assert said["resumed by path"] > 20
