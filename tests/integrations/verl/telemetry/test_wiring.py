"""One flag has agent loops note completion times, alone or together with the features that need agent loops of ours, too."""

import importlib.util

import pytest
from omegaconf import OmegaConf

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed", allow_module_level=True)

from rl_accel.errors import ConfigError
from rl_accel.features.telemetry import TelemetryFlags
from rl_accel.integrations.verl import agent_loop
from rl_accel.integrations.verl.telemetry import WORKER_PART
from rl_accel.integrations.verl.telemetry.wiring import file_of, refuse_unwired, wire
from rl_accel.patches.verl import config_intake
from rl_accel.runtime import RUNTIME

ON = TelemetryFlags(enable=True)


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


def changed(composed, keys):
    config = composed.copy()
    for key, value in keys.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


def test_one_flag_sets_the_agent_loops_and_the_file_and_nothing_else(composed):
    config = changed(composed, {"trainer.default_local_dir": "/somewhere/run"})
    wire(config, ON)
    assert str(file_of(config)) == "/somewhere/run/rl_accel_telemetry.jsonl"
    after = OmegaConf.to_container(config)
    before = OmegaConf.to_container(changed(composed, {"trainer.default_local_dir": "/somewhere/run"}))
    before["trainer"]["rl_accel_telemetry"] = {"file": "/somewhere/run/rl_accel_telemetry.jsonl"}
    before["actor_rollout_ref"]["rollout"]["agent"]["agent_loop_manager_class"] = agent_loop.MANAGER
    before["trainer"]["rl_accel_agent_loop_parts"] = [WORKER_PART]
    assert after == before
    wire(config, ON)
    assert OmegaConf.to_container(config) == after, "a second time changes nothing"


def test_agent_loops_of_the_users_are_refused(composed):
    config = changed(composed, {agent_loop.KEY: "mine.Manager"})
    before = OmegaConf.to_container(config)
    with pytest.raises(
        ConfigError, match=r"rl_accel\.telemetry wants .*agent_loop_manager_class = None, found mine\.Manager"
    ):
        wire(config, ON)
    assert OmegaConf.to_container(config) == before


def test_bare_enable_leaves_it_off(composed):
    config = changed(composed, {"rl_accel.auto": True})
    config_intake.in_driver(config)
    assert file_of(config) is None


def test_a_trainer_that_nobody_wired_is_stopped(composed):
    with pytest.raises(ConfigError, match=r"rl_accel_telemetry in the configuration of the trainer, found nothing"):
        refuse_unwired(composed)


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
