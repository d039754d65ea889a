"""One flag puts our reward manager over the configured one; what it cannot work with is refused by name."""

import pytest
from omegaconf import OmegaConf

from rl_accel.errors import ConfigError
from rl_accel.features import RewardTimeoutFlags
from rl_accel.integrations.verl import agent_loop
from rl_accel.integrations.verl.reward_timeout import MANAGER, MANAGER_MODULE, WORKER_PART, refuse_unwired, wire

ON = RewardTimeoutFlags(enable=True)
LOOPS = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"


def changed(composed, **keys):
    config = composed.copy()
    for key, value in keys.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return config


def test_one_flag_sets_the_keys_of_the_official_seams_and_nothing_else(composed):
    config = changed(composed, trainer__default_local_dir="/somewhere/run")
    wire(config, RewardTimeoutFlags(enable=True, scale=2.0, workers=3))
    section = config.reward.reward_timeout
    assert section.manager == {"source": "register", "name": "naive", "path": None}
    assert RewardTimeoutFlags(**section.flags) == RewardTimeoutFlags(enable=True, scale=2.0, workers=3)
    assert section.anchors == "/somewhere/run/rl_accel_reward_anchors.json"

    before, after = OmegaConf.to_container(composed), OmegaConf.to_container(config)
    before["trainer"]["default_local_dir"] = "/somewhere/run"
    before["reward"]["reward_manager"].update(source="importlib", name=MANAGER)
    before["reward"]["reward_manager"]["module"]["path"] = MANAGER_MODULE
    before["reward"]["reward_timeout"] = after["reward"]["reward_timeout"]
    before["actor_rollout_ref"]["rollout"]["agent"]["agent_loop_manager_class"] = agent_loop.MANAGER
    before["trainer"]["rl_accel_agent_loop_parts"] = [WORKER_PART]
    assert after == before

    wire(config, RewardTimeoutFlags(enable=True, scale=2.0, workers=3))
    assert OmegaConf.to_container(config) == after, "a second time changes nothing"


def test_a_manager_of_the_users_is_remembered(composed):
    keys = {"source": "importlib", "name": "Mine", "module__path": "/x/mine.py"}
    config = changed(composed, **{f"reward__reward_manager__{key}": value for key, value in keys.items()})
    wire(config, ON)
    assert config.reward.reward_timeout.manager == {"source": "importlib", "name": "Mine", "path": "/x/mine.py"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"reward__reward_model__enable": True}, r"custom_reward_function\.path = a function, found None"),
        (
            {"reward__reward_model__enable": True, "reward__custom_reward_function__path": "x.py"},
            r"reward\.reward_model\.enable_resource_pool = True, found False",
        ),
        ({LOOPS.replace(".", "__"): "mine.Manager"}, r"agent_loop_manager_class = None, found mine\.Manager"),
        ({"reward__reward_manager__name": "prime"}, r"reward_manager\.name = one of .*naive.*, found prime"),
    ],
)
def test_what_cannot_work_is_refused(composed, keys, message):
    config = changed(composed, **keys)
    before = OmegaConf.to_container(config)
    with pytest.raises(ConfigError, match=r"rl_accel\.reward_timeout wants .*" + message):
        wire(config, ON)
    assert OmegaConf.to_container(config) == before


def test_a_verl_without_a_reward_loop_is_refused():
    with pytest.raises(ConfigError, match=r"wants verl 0\.8\.0 or later with its reward loop"):
        wire(OmegaConf.create({"trainer": {}}), ON)


def test_a_trainer_that_nobody_wired_is_stopped(composed):
    with pytest.raises(ConfigError, match=rf"reward_manager\.name = {MANAGER} in the trainer, found naive"):
        refuse_unwired(composed)
    config = changed(composed)
    wire(config, ON)
    refuse_unwired(config)


def test_verls_intake_wires_both_features_and_neither_without_flags(composed):
    from rl_accel.patches.verl import config_intake
    from rl_accel.runtime import RUNTIME

    layers = RUNTIME.layers()
    flags = {"rl_accel__tail_batching": {"enable": True}, "rl_accel__reward_timeout": {"enable": True}}
    sizes = {
        "data__train_batch_size": 8,
        "actor_rollout_ref__actor__ppo_mini_batch_size": 8,
        "critic__ppo_mini_batch_size": 8,
    }
    try:
        config = changed(composed)
        config_intake.in_driver(config)
        assert OmegaConf.to_container(config) == OmegaConf.to_container(composed)
        config = changed(composed, **sizes, **flags)
        with pytest.raises(ConfigError, match="tail_batching"):
            config_intake.in_trainer(config)
        config_intake.in_driver(config)
        assert config.reward.reward_manager.name == MANAGER
        assert OmegaConf.select(config, LOOPS) == agent_loop.MANAGER
        config_intake.in_driver(config)
        config_intake.in_trainer(config)
    finally:
        RUNTIME.restore(layers)


def test_numbers_are_collected_while_the_feature_is_on(python):
    done = python("""
        import rl_accel
        from rl_accel.telemetry import metrics
        rl_accel.enable(reward_timeout=True)
        assert rl_accel.status()["reward_timeout"].patches[0].state == "waiting"
        import verl.experimental.reward_loop
        assert type(metrics.observer("reward_timeout")).__name__ == "Collector"
        assert rl_accel.status()["reward_timeout"].applied
        rl_accel.disable()
        assert metrics.observer("reward_timeout") is None
    """)
    assert done.returncode == 0, done.stderr
