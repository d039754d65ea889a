"""Tests TP replan on verl: the sizes that a configuration allows, and the results of training steps."""

import json
from types import SimpleNamespace
from unittest import mock

import pytest

from rl_accel.errors import ConfigError
from rl_accel.features import TpReplanFlags
from rl_accel.integrations.ray import restart_note
from rl_accel.integrations.verl import tp_replan
from rl_accel.integrations.verl.tp_replan import StepObserver, bounds_of, wire
from rl_accel.parallel.tp_planner import STATE_FILE
from rl_accel.patches.verl.verl_run import VerlRun
from rl_accel.telemetry.server_counters import Reading

TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
MODEL = {"model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 4, **SIZES}
ON = TpReplanFlags(enable=True)


@pytest.fixture
def configure(configured, tmp_path):
    """``configure(keys)``: verl's configuration for 4 GPUs in a node, TP 1, and a model of 4 heads on disk."""

    def make(keys=(), model=MODEL):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(model))
        folders = {"trainer.default_local_dir": str(tmp_path / "checkpoints")}
        return configured({**folders, "actor_rollout_ref.model.path": str(folder), **dict(keys)})

    return make


def test_bounds_come_from_the_cluster_the_model_and_the_flags(configure):
    assert bounds_of(configure(), ON).sizes == (1, 2, 4)
    assert bounds_of(configure({"trainer.nnodes": 2, "trainer.n_gpus_per_node": 2}), ON).sizes == (1, 2)
    assert bounds_of(configure({"actor_rollout_ref.rollout.data_parallel_size": 2}), ON).sizes == (1, 2)
    assert bounds_of(configure(), TpReplanFlags(enable=True, max_tp=2)).sizes == (1, 2)
    two_heads = configure(model={"num_attention_heads": 2})
    assert bounds_of(two_heads, ON).sizes == (1, 2)
    with pytest.raises(ConfigError, match=r"possible on 4 GPUs: TP 1: is below min_tp = 4; .*TP 4"):
        wire(VerlRun(two_heads, in_driver=True), TpReplanFlags(enable=True, min_tp=4))
    flags = TpReplanFlags(enable=True, memory_gb=80.0)
    unknown = bounds_of(configure({"actor_rollout_ref.model.path": "/no/such/model"}), flags)
    assert (unknown.sizes, "the model" in unknown.note) == ((1, 2, 4), True)


CALM, HIGH = 12, 60
RISE = [CALM] * 6 + [HIGH] * 2
"""Preemptions of steps, the last of which is enough for a decision."""


@pytest.fixture
def run(configure, monkeypatch):
    """``run(flags, keys)``: a trainer with one server, and ``step(number, preemptions)`` that shows a step to the observer."""
    total = SimpleNamespace(value=0)
    monkeypatch.setattr(tp_replan, "read_servers", lambda engine, servers: {"s": Reading(total.value)})

    def make(flags=None, keys=()):
        calls = []
        servers = SimpleNamespace(calls=calls, sleep_replicas=lambda: calls.append("sleep"))
        servers.update_weights = lambda step: calls.append(f"wake {step}")
        trainer = SimpleNamespace(config=configure(keys), checkpoint_manager=servers, global_steps=0)
        trainer.total_training_steps, trainer.steps_per_epoch = 100, 10**6
        trainer.llm_server_manager = SimpleNamespace(server_addresses=["s"])
        trainer._save_checkpoint = lambda: calls.append(f"save {trainer.global_steps}")
        observer = StepObserver(TpReplanFlags(enable=True, **(flags or {})), lambda: trainer)

        def step(number, preemptions, **more):
            trainer.global_steps = number
            total.value += preemptions
            data = {"training/global_step": number, "timing_s/gen": 10.0, "perf/total_num_tokens": 1000}
            data |= {"response_length/mean": 80.0, "prompt_length/mean": 20.0, **more}
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
    for words in ("advice after step 8: raise TP 1 to 2", "5.000 times", "expected:"):
        assert words in advice
    assert "\n" not in advice
    assert (one.trainer.checkpoint_manager.calls, one.trainer.total_training_steps) == ([], 100)
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
    assert StepObserver(TpReplanFlags(enable=True), lambda: None)(1, {"training/global_step": 1}) == {}, "no trainer"


@pytest.fixture
def notes(monkeypatch):
    left = []
    monkeypatch.setattr(restart_note, "publish", left.append)
    return left


def test_a_restart_saves_leaves_a_note_and_makes_the_step_the_last(run, notes):
    one = run({"action": "restart"})
    assert rise(one)["wanted_tp"] == 2.0
    assert (one.trainer.checkpoint_manager.calls, one.trainer.total_training_steps) == (["sleep", "save 8"], 8)
    folder = one.trainer.config.trainer.default_local_dir
    overrides = [f"{TP}=2", "trainer.resume_mode=auto", f"trainer.default_local_dir='{folder}'"]
    (note,) = notes
    assert note.pop("reason").startswith("raise TP 1 to 2: preemptions are ")
    assert note == {"step": 8, "overrides": [*overrides, "trainer.val_before_train=False"]}


def test_what_is_saved_already_is_not_saved_again(run, notes):
    one = run({"action": "restart"}, {"trainer.save_freq": 4})
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
    one.trainer._save_checkpoint = mock.Mock(side_effect=OSError("no space left on device"))
    assert rise(one)["wanted_tp"] == 2.0
    assert one.trainer.checkpoint_manager.calls == ["sleep", "wake 8"]
    assert (one.trainer.total_training_steps, notes) == (100, [])
    assert "step 8 could not be saved; going on at the old size" in caplog.text
    assert one.step(9, 60)["wanted_tp"] == 1.0, "it is not asked for again at once"


def test_a_restarted_run_goes_on_with_what_the_launch_before_saw(run, notes, tmp_path):
    rise(run({"action": "restart"}))
    step, *_ = json.loads((tmp_path / "checkpoints" / STATE_FILE).read_text())["steps"]
    assert step == {"step": 1, "kind": "all", "tp": 1, "preemptions": 12, "rollout_seconds": 10.0, "tokens": 800}
    assert run({"action": "restart"}, {TP: 2}).step(9, 0)["changes"] == 1.0
