"""Tests that the agent-loop worker is verl's worker plus the parts of the enabled features, and nothing else."""

import copy
import itertools
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from rl_accel.integrations.verl import agent_loop, reward_timeout, tail_batching, telemetry
from rl_accel.integrations.verl.reward_worker_proxy import RewardWorkerProxy
from rl_accel.patches.verl import config_intake

FEATURES = (reward_timeout, tail_batching, telemetry)
PARTS = {feature.__name__.rpartition(".")[2]: feature.WORKER_PART for feature in FEATURES}
COMBINATIONS = [chosen for count in range(4) for chosen in itertools.combinations(PARTS, count)]
LEGACY = [chosen for chosen in COMBINATIONS if chosen and "tail_batching" not in chosen]


@pytest.fixture
def wired(configured):
    """``wired(features, keys)``: verl's configuration, wired twice for these features."""

    def wire(features, keys):
        config = configured({**keys, **{f"rl_accel.{name}.enable": True for name in features}})
        for _ in range(2):
            config_intake.in_driver(config)
            config_intake.in_trainer(config)
        return config

    return wire


def names(cls):
    return [f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__]


@pytest.mark.parametrize(("features", "use_v1"), [*((c, True) for c in COMBINATIONS), *((c, False) for c in LEGACY)])
def test_a_worker_has_the_parts_of_the_features_that_are_on_and_no_other(wired, features, use_v1):
    config = wired(features, {"trainer.use_v1": use_v1})
    ours = agent_loop.MANAGER if use_v1 else agent_loop.LEGACY_MANAGER
    assert OmegaConf.select(config, agent_loop.KEY) == (ours if features else None)
    order = names(agent_loop.worker_class(config))
    parts = [name for name in order[1:] if name.startswith("rl_accel.") and not name.endswith(".WorkerPart")]
    assert sorted(parts) == sorted(PARTS[feature] for feature in features)
    assert parts[:1] == [PARTS["tail_batching"]] or "tail_batching" not in features
    verls = "agent_loop_tq.AgentLoopWorkerTQ" if use_v1 else "agent_loop.AgentLoopWorker"
    (base,) = (name for name in agent_loop.worker_class(config).__bases__ if name.__module__.startswith("verl."))
    assert names(base)[0].endswith(verls)
    assert any(name.startswith("verl.") for name in names(agent_loop.manager_class(config)))


@pytest.mark.parametrize("features", COMBINATIONS)
def test_only_features_that_need_it_put_proxies_before_reward_workers(composed, wired, features, monkeypatch):
    def start(self, config, llm_client=None, teacher_client=None, reward_loop_worker_handles=None):
        self.config, self.llm_client, self.reward_loop_worker_handles = config, llm_client, reward_loop_worker_handles

    config = wired(features, {})
    (verls,) = agent_loop.worker_class(composed).__bases__
    monkeypatch.setattr(verls, "__init__", start)  # verl's wants models and a cluster
    handles = [SimpleNamespace(compute_score_batch="a method"), SimpleNamespace()]
    worker = agent_loop.worker_class(config)(config, reward_loop_worker_handles=handles)
    with_rewards = worker.reward_loop_worker_handles
    if set(features) <= {"telemetry"}:
        assert with_rewards is handles
    else:
        assert [type(handle) for handle in with_rewards] == [RewardWorkerProxy] * 2
        assert copy.copy(with_rewards[0]).compute_score_batch == "a method", "what only the user's agent loops call"
    assert agent_loop.worker_class(config)(config).reward_loop_worker_handles is None
