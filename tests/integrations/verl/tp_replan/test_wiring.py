"""What a configuration allows, and what is refused by name before anything starts."""

import pytest
from omegaconf import OmegaConf

from rl_accel.errors import ConfigError
from rl_accel.features.tp_replan import TpReplanFlags
from rl_accel.integrations.verl.tp_replan.wiring import bounds_of, refuse_unwired, settings_of, wire

ON = TpReplanFlags(enable=True)
RESTART = TpReplanFlags(enable=True, action="restart")
ROLLOUT = "actor_rollout_ref__rollout__"


@pytest.fixture(autouse=True)
def unarmed(monkeypatch):
    """The exit code of the tests' own process stays as it is."""
    calls = []
    monkeypatch.setattr("rl_accel.integrations.ray.restart_note.arm", lambda: calls.append(1))
    return calls


def test_the_cpu_engine_counts_anyway_and_nothing_in_the_configuration_changes(configure, unarmed):
    config = configure()
    before = OmegaConf.to_container(config)
    wire(config, ON)
    assert OmegaConf.to_container(config) == before
    refuse_unwired(config)
    assert unarmed == [], "advice needs no exit code"


@pytest.mark.parametrize(
    ("engine", "key", "value"),
    [("vllm", "disable_log_stats", False), ("sglang", "engine_kwargs.sglang.enable_metrics", True)],
)
def test_servers_are_told_to_count_and_a_driver_that_did_not_is_named(configure, engine, key, value):
    config = configure(**{ROLLOUT + "name": engine})
    with pytest.raises(ConfigError, match=rf"wants actor_rollout_ref\.rollout\.{key} = {value}.*validate_config"):
        refuse_unwired(config)
    wire(config, ON)
    assert OmegaConf.select(config.actor_rollout_ref.rollout, key) is value
    refuse_unwired(config)
    wire(config, ON)


def test_a_restart_arms_the_exit_code_of_the_driver(configure, unarmed):
    wire(configure(), RESTART)
    assert unarmed == [1]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"trainer__use_v1": False}, r"trainer\.use_v1 = True"),
        (
            {"trainer__v1__trainer_mode": "colocate_async"},
            r"trainer_mode = sync or tail_batching, found colocate_async",
        ),
        ({ROLLOUT + "name": "trtllm"}, r"rollout\.name = one of hf_cpu, vllm, sglang, found trtllm"),
        ({ROLLOUT + "disaggregation__enabled": True}, r"disaggregation\.enabled = False"),
        ({ROLLOUT + "data_parallel_size": 3}, r"a divisor of 4 GPUs, found 3"),
        ({ROLLOUT + "tensor_model_parallel_size": 3}, r"size = one of 1, 2, 4, found 3 \(does not divide 4 GPUs"),
    ],
)
def test_what_it_cannot_work_with_is_refused_by_name(configure, keys, message):
    with pytest.raises(ConfigError, match=message):
        wire(configure(**keys), ON)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"actor_rollout_ref__actor__checkpoint__async_save": True}, r"actor\.checkpoint\.async_save = False"),
        (
            {"actor_rollout_ref__actor__checkpoint__save_contents": ["model"]},
            r"save_contents = model, optimizer and extra, found \['model'\]",
        ),
        ({"trainer__default_local_dir": None}, r"default_local_dir = a folder"),
    ],
)
def test_a_restart_wants_checkpoints_that_hold_everything_and_advice_does_not(configure, keys, message):
    with pytest.raises(ConfigError, match=message):
        wire(configure(**keys), RESTART)
    wire(configure(**keys), ON)


def test_live_wants_an_engine_that_can_be_relaunched_and_checkpoints_as_a_restart(configure):
    live = TpReplanFlags(enable=True, action="live")
    wire(configure(), live)
    with pytest.raises(ConfigError) as caught:
        wire(configure(**{ROLLOUT + "name": "vllm"}), live)
    assert str(caught.value) == (
        "rl_accel.tp_replan.action=live wants actor_rollout_ref.rollout.name = hf_cpu, found vllm (training workers hold on to "
        "the servers that they began with); use action=restart"
    )
    with pytest.raises(ConfigError, match="async_save = False"):
        wire(configure(actor_rollout_ref__actor__checkpoint__async_save=True), live)


def test_bounds_come_from_the_cluster_the_model_and_the_flags(configure):
    assert bounds_of(configure(), ON).sizes == (1, 2, 4)
    assert bounds_of(configure(trainer__nnodes=2, trainer__n_gpus_per_node=2), ON).sizes == (1, 2)
    assert bounds_of(configure(**{ROLLOUT + "data_parallel_size": 2}), ON).sizes == (1, 2)
    assert bounds_of(configure(), TpReplanFlags(enable=True, max_tp=2)).sizes == (1, 2)
    assert bounds_of(configure(model={"num_attention_heads": 2}), ON).sizes == (1, 2)


def test_bounds_that_no_size_satisfies_are_one_clear_error(configure):
    with pytest.raises(
        ConfigError, match=r"no tensor-parallel size is possible on 4 GPUs: TP 1: is below min_tp = 4; .*TP 4"
    ):
        wire(configure(model={"num_attention_heads": 2}), TpReplanFlags(enable=True, min_tp=4))


def test_flags_that_contradict_each_other_are_named(configure):
    with pytest.raises(ConfigError, match="max_tp must be at least min_tp = 2"):
        wire(configure(), TpReplanFlags(enable=True, min_tp=2, max_tp=1))


def test_the_share_of_memory_is_the_engines_unless_it_is_given(configure):
    config = configure(**{ROLLOUT + "gpu_memory_utilization": 0.4})
    assert settings_of(config, ON).memory_share == 0.4
    assert settings_of(config, TpReplanFlags(enable=True, memory_share=0.8)).memory_share == 0.8


def test_a_model_that_cannot_be_read_bounds_nothing(configure):
    bounds = bounds_of(configure(actor_rollout_ref__model__path="/no/such/model"), ON)
    assert bounds.sizes == (1, 2, 4)
    assert "the model" in bounds.note
