"""One flag turns a sync recipe into tail batching; without it verl's configuration stays as it was composed."""

import importlib.util

import pytest
from omegaconf import OmegaConf

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed", allow_module_level=True)

from rl_accel.config import TailBatchingConfig
from rl_accel.errors import ConfigError
from rl_accel.integrations.verl.tail_batching.wiring import settings_of, wire


@pytest.fixture(scope="module")
def composed():
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            [
                "data.train_batch_size=8",
                "actor_rollout_ref.actor.ppo_mini_batch_size=4",
                "critic.ppo_mini_batch_size=8",
            ],
        )


def changed(composed, **keys):
    config = composed.copy()
    for key, value in keys.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return config


def plain(config):
    return OmegaConf.to_container(config)


def test_one_flag_sets_the_keys_of_the_official_seams_and_nothing_else(composed):
    config = changed(composed)
    wire(config, TailBatchingConfig(enable=True, prompt_ratio="auto", queue_threshold=3))
    assert config.trainer.v1.trainer_mode == "tail_batching"
    settings = settings_of(config)
    assert (settings.prompts_per_step, settings.prompt_ratio, settings.threshold) == (8, "auto", 3)

    before, after = plain(composed), plain(config)
    before["trainer"]["v1"]["trainer_mode"] = "tail_batching"
    before["trainer"]["v1"]["tail_batching"] = after["trainer"]["v1"]["tail_batching"]
    before["data"]["gen_batch_size"] = 1
    agent = before["actor_rollout_ref"]["rollout"]["agent"]
    agent["agent_loop_manager_class"] = "rl_accel.integrations.verl.tail_batching.agent_loop.TailAgentLoopManager"
    assert after == before

    wire(config, TailBatchingConfig(enable=True, prompt_ratio="auto", queue_threshold=3))
    assert plain(config) == after, "a second time changes nothing"


@pytest.mark.parametrize("flags", [None, {"tail_batching": {"enable": False}}, {"auto": True}])
def test_intake_without_the_flag_leaves_verls_configuration_alone(composed, flags):
    from rl_accel.patches.verl import config_intake
    from rl_accel.runtime import RUNTIME

    config = changed(composed) if flags is None else changed(composed, rl_accel=flags)
    before = plain(config)
    layers = RUNTIME.layers()
    try:
        config_intake.take_in(config)
        config_intake.wire(config)
        config_intake.refuse_unwired(config)
    finally:
        RUNTIME.restore(layers)
    assert plain(config) == before


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"trainer__v1__trainer_mode": "colocate_async"}, "trainer.v1.trainer_mode = sync, found colocate_async"),
        ({"trainer__use_v1": False}, "trainer.use_v1 = True, found False"),
        ({"trainer__v1__sync__parameter_sync_step": 2}, "trainer.v1.sync.parameter_sync_step = 1, found 2"),
        ({"trainer__v1__sampler__custom_sampler__name": "Mine"}, "custom_sampler = None, found Mine"),
        (
            {"actor_rollout_ref__rollout__agent__agent_loop_manager_class": "my.Manager"},
            "agent_loop_manager_class = None, found my.Manager",
        ),
        ({"skip__rollout_tq__enable": True}, "skip.rollout_tq.enable = False, found True"),
        (
            {"actor_rollout_ref__actor__ppo_mini_batch_size": 3},
            "ppo_mini_batch_size = a divisor of data.train_batch_size = 8, found 3",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_key_wanted_and_found(composed, keys, message):
    config = changed(composed, **keys)
    before = plain(config)
    with pytest.raises(ConfigError, match=r"rl_accel\.tail_batching wants") as caught:
        wire(config, TailBatchingConfig(enable=True))
    assert message in str(caught.value)
    assert plain(config) == before


def test_a_verl_without_the_v1_trainer_is_refused():
    with pytest.raises(ConfigError, match=r"wants verl 0\.9\.1 or later with its V1 trainer, found verl"):
        wire(OmegaConf.create({"trainer": {}}), TailBatchingConfig(enable=True))


def test_a_trainer_that_nobody_wired_is_stopped(composed):
    from rl_accel.patches.verl import config_intake
    from rl_accel.runtime import FRAMEWORK, RUNTIME

    layers = RUNTIME.layers()
    try:
        RUNTIME.set_layer(FRAMEWORK, {"tail_batching": {"enable": True}})
        with pytest.raises(ConfigError, match=r"trainer_mode = tail_batching in the trainer, found sync"):
            config_intake.refuse_unwired(composed)
    finally:
        RUNTIME.restore(layers)


@pytest.mark.slow
def test_the_mode_is_registered_while_the_feature_is_on(python):
    done = python("""
        import rl_accel
        rl_accel.enable(tail_batching=True)
        print(rl_accel.status()["tail_batching"].patches[0].state)
        from verl.trainer.ppo.v1 import get_trainer_cls
        assert get_trainer_cls("tail_batching").__name__ == "TailBatchingTrainer"
        assert rl_accel.status()["tail_batching"].applied
        rl_accel.disable()
        try:
            get_trainer_cls("tail_batching")
        except ValueError as error:
            assert "sync" in str(error)
        else:
            raise AssertionError("still registered")
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "waiting"
