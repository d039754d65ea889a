"""A worker of agent loops is verl's with the parts of the features that are on, and nothing else."""

import importlib.util
import itertools
import json

import pytest
from omegaconf import OmegaConf

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed", allow_module_level=True)

from rl_accel.errors import ConfigError
from rl_accel.integrations.verl import agent_loop, reward_timeout, tail_batching, telemetry
from rl_accel.integrations.verl.reward_worker_proxy import RewardWorkerProxy
from rl_accel.patches.verl import config_intake
from rl_accel.runtime import RUNTIME

PARTS = {
    feature.__name__.rpartition(".")[2]: feature.WORKER_PART for feature in (reward_timeout, tail_batching, telemetry)
}
SIZES = {"data.train_batch_size": 8, "actor_rollout_ref.actor.ppo_mini_batch_size": 8, "critic.ppo_mini_batch_size": 8}


@pytest.fixture(scope="module")
def composed():
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer")


@pytest.fixture(autouse=True)
def flags_are_put_back():
    layers = RUNTIME.layers()
    yield
    RUNTIME.restore(layers)


def wired(composed, features, keys):
    config = composed.copy()
    for key, value in {**SIZES, **keys, **{f"rl_accel.{name}.enable": True for name in features}}.items():
        OmegaConf.update(config, key, value, force_add=True)
    for _ in range(2):
        config_intake.in_driver(config)
        config_intake.in_trainer(config)
    return config


def names(cls):
    return [f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__]


@pytest.mark.parametrize("use_v1", [True, False])
@pytest.mark.parametrize("features", [c for n in range(4) for c in itertools.combinations(PARTS, n)])
def test_a_worker_has_the_parts_of_the_features_that_are_on_and_no_other(composed, features, use_v1):
    if "tail_batching" in features and not use_v1:
        pytest.skip("tail batching wants the V1 trainer")
    config = wired(composed, features, {"trainer.use_v1": use_v1})
    assert OmegaConf.select(config, agent_loop.KEY) == (agent_loop.MANAGER if features else None)
    order = names(agent_loop.worker_class(config))
    parts = [name for name in order[1:] if name.startswith("rl_accel.") and not name.endswith(".WorkerPart")]
    assert sorted(parts) == sorted(PARTS[feature] for feature in features)
    assert parts[:1] == [PARTS["tail_batching"]] or "tail_batching" not in features
    verls = "agent_loop_tq.AgentLoopWorkerTQ" if use_v1 else "agent_loop.AgentLoopWorker"
    (base,) = (name for name in agent_loop.worker_class(config).__bases__ if name.__module__.startswith("verl."))
    assert names(base)[0].endswith(verls)
    assert any(name.startswith("verl.") for name in names(agent_loop.manager_class(config)))


def test_a_manager_of_the_users_is_refused(composed):
    config = composed.copy()
    OmegaConf.update(config, agent_loop.KEY, "mine.Manager", force_add=True)
    with pytest.raises(ConfigError, match=r"the\.flag wants .*agent_loop_manager_class = None, found mine\.Manager"):
        agent_loop.check(config, "the.flag", "why")


@pytest.mark.parametrize("features", [c for n in range(4) for c in itertools.combinations(PARTS, n)])
def test_only_features_that_need_it_put_proxies_before_reward_workers(composed, features, monkeypatch):
    def start(self, config, llm_client=None, teacher_client=None, reward_loop_worker_handles=None):
        self.config, self.llm_client, self.reward_loop_worker_handles = config, llm_client, reward_loop_worker_handles

    (verls,) = agent_loop.worker_class(composed).__bases__
    monkeypatch.setattr(verls, "__init__", start)  # verl's wants models and a cluster
    config = wired(composed, features, {})
    handles = [object(), object()]
    with_rewards = agent_loop.worker_class(config)(
        config, reward_loop_worker_handles=handles
    ).reward_loop_worker_handles
    if set(features) <= {"telemetry"}:
        assert with_rewards is handles
    else:
        assert [type(handle) for handle in with_rewards] == [RewardWorkerProxy] * 2
    assert agent_loop.worker_class(config)(config).reward_loop_worker_handles is None


@pytest.mark.slow
@pytest.mark.parametrize("first", PARTS.values())
def test_a_worker_process_can_import_each_part_first(python, first):
    """In a process with the flags on, verl's modules register ours while they are imported."""
    done = python(
        f"""
        import importlib
        import verl
        importlib.import_module({first.rpartition(".")[0]!r})
        """,
        RL_ACCEL_CONFIG=json.dumps(dict.fromkeys(PARTS, True)),
    )
    assert done.returncode == 0, done.stderr[-2000:]
