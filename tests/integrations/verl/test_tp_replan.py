"""TP replan on verl: what a configuration allows, and what the trainer's steps lead to."""

import json
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")

from rl_accel.errors import ConfigError
from rl_accel.features import TpReplanFlags
from rl_accel.integrations.ray import restart_note
from rl_accel.integrations.verl import tp_replan
from rl_accel.integrations.verl.engines import Engine, register
from rl_accel.integrations.verl.tp_replan import StepObserver, bounds_of, refuse_unwired, wire
from rl_accel.parallel.tp_planner import STATE_FILE
from rl_accel.telemetry.server_counters import Reading

TP = "actor_rollout_ref__rollout__tensor_model_parallel_size"
MODEL = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
}


@pytest.fixture(scope="session")
def composed():
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer")


@pytest.fixture
def configure(composed, tmp_path):
    """``configure(**keys)``: 4 GPUs in a node, TP 1, a model of 4 heads on disk. ``__`` in a key stands for a dot."""

    def make(model=MODEL, **keys):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(model))
        config = composed.copy()
        given = {
            "trainer__n_gpus_per_node": 4,
            "trainer__default_local_dir": str(tmp_path / "checkpoints"),
            "actor_rollout_ref__model__path": str(folder),
            "actor_rollout_ref__rollout__name": "vllm",
            TP: 1,
            **keys,
        }
        for key, value in given.items():
            OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
        return config

    return make


# In the driver

ON = TpReplanFlags(enable=True)
RESTART = TpReplanFlags(enable=True, action="restart")
ROLLOUT = "actor_rollout_ref__rollout__"


@pytest.fixture(autouse=True)
def unarmed(monkeypatch):
    """The exit code of the tests' own process stays as it is."""
    calls = []
    monkeypatch.setattr("rl_accel.integrations.ray.restart_note.arm", lambda: calls.append(1))
    return calls


def test_an_engine_that_counts_anyway_needs_no_change_of_the_configuration(configure, unarmed):
    register("counts_anyway", Engine(read_counters=lambda servers: dict.fromkeys(servers)))
    config = configure(**{ROLLOUT + "name": "counts_anyway"})
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
    ("key", "value", "message"),
    [
        ("trainer__use_v1", False, r"trainer\.use_v1 = True"),
        ("trainer__v1__trainer_mode", "colocate_async", r"trainer_mode = sync or tail_batching, found colocate_async"),
        (ROLLOUT + "name", "trtllm", r"rollout\.name = one of .*sglang, vllm, found trtllm"),
        (ROLLOUT + "disaggregation__enabled", True, r"disaggregation\.enabled = False"),
        (ROLLOUT + "data_parallel_size", 3, r"a divisor of 4 GPUs, found 3"),
        (TP, 3, r"size = one of 1, 2, 4, found 3 \(does not divide 4 GPUs"),
    ],
)
def test_what_it_cannot_work_with_is_refused_by_name(configure, key, value, message):
    with pytest.raises(ConfigError, match=message):
        wire(configure(**{key: value}), ON)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("actor_rollout_ref__actor__checkpoint__async_save", True, r"actor\.checkpoint\.async_save = False"),
        ("critic__checkpoint__save_contents", ["model"], r"= model, optimizer and extra, found \['model'\]"),
        ("trainer__default_local_dir", None, r"default_local_dir = a folder"),
    ],
)
def test_a_restart_wants_checkpoints_that_hold_everything_and_advice_does_not(configure, key, value, message):
    with pytest.raises(ConfigError, match=message):
        wire(configure(**{key: value}), RESTART)
    wire(configure(**{key: value}), ON)


def test_bounds_come_from_the_cluster_the_model_and_the_flags(configure):
    assert bounds_of(configure(), ON).sizes == (1, 2, 4)
    assert bounds_of(configure(trainer__nnodes=2, trainer__n_gpus_per_node=2), ON).sizes == (1, 2)
    assert bounds_of(configure(**{ROLLOUT + "data_parallel_size": 2}), ON).sizes == (1, 2)
    assert bounds_of(configure(), TpReplanFlags(enable=True, max_tp=2)).sizes == (1, 2)
    assert bounds_of(configure(model={"num_attention_heads": 2}), ON).sizes == (1, 2)


def test_bounds_that_no_size_satisfies_are_one_clear_error(configure):
    with pytest.raises(ConfigError, match=r"possible on 4 GPUs: TP 1: is below min_tp = 4; .*TP 4"):
        wire(configure(model={"num_attention_heads": 2}), TpReplanFlags(enable=True, min_tp=4))


def test_a_model_that_cannot_be_read_bounds_nothing(configure):
    flags = TpReplanFlags(enable=True, memory_gb=80.0)
    bounds = bounds_of(configure(actor_rollout_ref__model__path="/no/such/model"), flags)
    assert bounds.sizes == (1, 2, 4)
    assert "the model" in bounds.note


# In the trainer's process


CALM, HIGH = 12, 60
RISE = [CALM] * 6 + [HIGH] * 2
"""Preemptions of steps, the last of which is enough for a decision."""


@pytest.fixture
def run(configure, monkeypatch):
    """``run(flags, **keys)``: a trainer with one server, and ``step(number, preemptions)`` that shows a step to the observer."""
    total = SimpleNamespace(value=0)
    monkeypatch.setattr(
        tp_replan,
        "read_servers",
        lambda engine, servers: {"s": None if total.value is None else Reading(total.value)},
    )

    def make(flags=None, **keys):
        calls = []
        trainer = SimpleNamespace(
            config=configure(**keys),
            llm_server_manager=SimpleNamespace(server_addresses=["s"]),
            checkpoint_manager=SimpleNamespace(
                calls=calls,
                sleep_replicas=lambda: calls.append("sleep"),
                update_weights=lambda step: calls.append(f"wake {step}"),
            ),
            total_training_steps=100,
            steps_per_epoch=10**6,
            global_steps=0,
        )
        trainer._save_checkpoint = lambda: calls.append(f"save {trainer.global_steps}")
        observer = StepObserver(TpReplanFlags(enable=True, **(flags or {})), lambda: trainer)

        def step(number, preemptions, **more):
            trainer.global_steps = number
            total.value = None if preemptions is None else (total.value or 0) + preemptions
            data = {
                "training/global_step": number,
                "timing_s/gen": 10.0,
                "perf/total_num_tokens": 1000,
                "response_length/mean": 80.0,
                "prompt_length/mean": 20.0,
                **more,
            }
            return {name.removeprefix("tp_replan/"): value for name, value in observer(number, data).items()}

        return SimpleNamespace(step=step, trainer=trainer, observer=observer, total=total)

    return make


def rise(run):
    """Steps 1 to 8, at the last of which a larger size is wanted; return its numbers."""
    return [run.step(1 + i, count) for i, count in enumerate(RISE)][-1]


def test_advice_is_one_line_and_leaves_the_trainer_alone(run, caplog):
    one = run()
    assert rise(one) == {"tp": 1.0, "wanted_tp": 2.0, "preemptions": 60.0, "changes": 0.0}
    (advice,) = [line for record in caplog.records if "advice" in (line := record.getMessage())]
    assert "advice after step 8: raise TP 1 to 2" in advice
    assert "5.000 times" in advice
    assert "expected:" in advice
    assert "\n" not in advice
    assert one.trainer.checkpoint_manager.calls == []
    assert one.trainer.total_training_steps == 100
    assert one.step(9, 60)["wanted_tp"] == 1.0


def test_preemptions_of_validation_are_not_taken_for_those_of_a_step(run):
    one = run()
    one.total.value = 500  # those of the validation before the first step
    one.observer(0, {"val-core/acc": 0.5})
    assert one.step(1, 2)["preemptions"] == 2.0
    assert "preemptions" not in one.step(2, 80, **{"val-core/acc": 0.5})
    assert one.step(3, 0, **{"val-core/acc": 0.5})["preemptions"] == 0.0, "none at all is none of the step's"


def test_numbers_that_are_missing_cost_one_warning(run, caplog):
    one = run()
    for number in (1, 2):
        assert one.step(number, 0, **{"timing_s/gen": None})["wanted_tp"] == 1.0
    assert caplog.text.count("tp_replan decides nothing: step 1 has no timing_s/gen") == 1


@pytest.fixture
def notes(monkeypatch):
    left = []
    monkeypatch.setattr(restart_note, "publish", left.append)
    return left


def test_a_restart_saves_leaves_a_note_and_makes_the_step_the_last(run, notes):
    one = run({"action": "restart"})
    assert rise(one)["wanted_tp"] == 2.0
    assert one.trainer.checkpoint_manager.calls == ["sleep", "save 8"]
    assert one.trainer.total_training_steps == 8
    overrides = [
        f"{TP.replace('__', '.')}=2",
        "trainer.resume_mode=auto",
        f"trainer.default_local_dir='{one.trainer.config.trainer.default_local_dir}'",
        "trainer.val_before_train=False",
    ]
    assert notes == [{"step": 8, "overrides": overrides}]


def test_what_is_saved_already_is_not_saved_again(run, notes):
    one = run({"action": "restart"}, trainer__save_freq=4)
    rise(one)
    assert (one.trainer.checkpoint_manager.calls, len(notes)) == ([], 1)


def test_after_the_last_step_nothing_is_restarted(run, notes, caplog):
    one = run({"action": "restart"})
    one.trainer.total_training_steps = 8
    rise(one)
    assert (one.trainer.checkpoint_manager.calls, notes) == ([], [])
    assert "step 8 is the last" in caplog.text


def test_a_checkpoint_that_cannot_be_saved_wakes_the_servers_and_training_goes_on(run, notes, caplog):
    one = run({"action": "restart"})

    def full():
        raise OSError("no space left on device")

    one.trainer._save_checkpoint = full
    assert rise(one)["wanted_tp"] == 2.0
    assert one.trainer.checkpoint_manager.calls == ["sleep", "wake 8"]
    assert (one.trainer.total_training_steps, notes) == (100, [])
    assert "step 8 could not be saved; going on at the old size" in caplog.text
    assert one.step(9, 60)["wanted_tp"] == 1.0, "it is not asked for again at once"


def test_a_restarted_run_goes_on_with_what_the_launch_before_saw(run, notes, tmp_path):
    rise(run({"action": "restart"}))
    step, *_ = json.loads((tmp_path / "checkpoints" / STATE_FILE).read_text())["steps"]
    assert step == {"step": 1, "kind": "all", "tp": 1, "preemptions": 12, "rollout_seconds": 10.0, "tokens": 800}
    assert run({"action": "restart"}, **{TP: 2}).step(9, 0)["changes"] == 1.0


def test_without_a_trainer_there_is_nothing_to_say():
    assert StepObserver(TpReplanFlags(enable=True), lambda: None)(1, {"training/global_step": 1}) == {}
