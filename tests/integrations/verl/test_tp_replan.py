"""Tests TP replan on verl: the sizes that a configuration allows, and the results of training steps."""

import json
from types import SimpleNamespace
from unittest import mock

import pytest

from rl_accel.errors import ConfigError
from rl_accel.features import TpReplanFlags
from rl_accel.integrations.verl import tp_replan
from rl_accel.integrations.verl.tp_replan import StepObserver, sizes_of, wire
from rl_accel.parallel.tp_planner import EARLIER_STEPS, LATEST_STEPS
from rl_accel.patches.verl.verl_run import VerlRun
from rl_accel.relaunch import NOTE
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


def test_sizes_come_from_the_cluster_the_model_and_the_flags(configure):
    assert sizes_of(configure(), ON) == [1, 2, 4]
    assert sizes_of(configure({"trainer.nnodes": 2, "trainer.n_gpus_per_node": 2}), ON) == [1, 2]
    assert sizes_of(configure({"actor_rollout_ref.rollout.data_parallel_size": 2}), ON) == [1, 2]
    assert sizes_of(configure(), TpReplanFlags(enable=True, max_tp=2)) == [1, 2]
    two_heads = configure(model={"num_attention_heads": 2})
    assert sizes_of(two_heads, ON) == [1, 2]
    with pytest.raises(ConfigError, match=r"possible on 4 GPUs: TP 1: is below min_tp = 4; .*TP 4"):
        wire(VerlRun(two_heads, in_driver=True), TpReplanFlags(enable=True, min_tp=4))
    unreadable = configure({"actor_rollout_ref.model.path": "/no/such/model"})
    assert sizes_of(unreadable, ON) == [1, 2, 4]


CALM, HIGH = 12, 60
RISE = [CALM] * EARLIER_STEPS + [HIGH] * LATEST_STEPS
"""Preemptions of steps, the last of which is enough for a decision."""
LAST = len(RISE)


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
            data = {"training/global_step": number, **more}
            return {name.removeprefix("tp_replan/"): value for name, value in observer(number, data).items()}

        return SimpleNamespace(step=step, trainer=trainer, observer=observer, total=total)

    return make


def rise(run):
    """Steps in the last of which a larger size is wanted; return its numbers."""
    return [run.step(1 + i, count) for i, count in enumerate(RISE)][-1]


def test_advice_is_one_line_and_leaves_the_trainer_alone(run, caplog):
    one = run()
    assert rise(one) == {"tp": 1.0, "wanted_tp": 2.0, "preemptions": 60.0}
    (advice,) = [line for record in caplog.records if "advise" in (line := record.getMessage())]
    assert f"advise after step {LAST}: raise TP 1 to 2: 3 steps with 60 preemptions or more, after 12 on" in advice
    assert (one.trainer.checkpoint_manager.calls, one.trainer.total_training_steps) == ([], 100)
    assert one.step(LAST + 1, 60)["wanted_tp"] == 1.0


@pytest.mark.parametrize("kind", ["short", "long", "final"])
def test_rounds_of_tail_batching_are_known_by_their_kind(run, kind):
    one = run()
    for number, count in enumerate(RISE, 1):
        one.step(2 * number, count, **{f"rl_accel/tail_batching/{kind}_round": 1.0})
        logged = one.step(2 * number + 1, 500)
    assert logged["wanted_tp"] == 1.0
    assert one.step(99, HIGH, **{f"rl_accel/tail_batching/{kind}_round": 1.0})["wanted_tp"] == 1.0, "it was asked for"


def test_preemptions_of_validation_are_not_taken_for_those_of_a_step(run):
    one = run()
    one.total.value = 500  # those of the validation before the first step
    one.observer(0, {"val-core/acc": 0.5})
    assert one.step(1, 2)["preemptions"] == 2.0
    assert "preemptions" not in one.step(2, 80, **{"val-core/acc": 0.5})
    assert one.step(3, 0, **{"val-core/acc": 0.5})["preemptions"] == 0.0, "none at all is none of the step's"


def test_without_a_trainer_there_is_nothing_to_say():
    assert StepObserver(ON, lambda: None)(1, {"training/global_step": 1}) == {}


@pytest.fixture
def note(tmp_path):
    """``note()``: what the trainer has left for ``rl-accel run``; None for nothing."""
    file = tmp_path / "checkpoints" / NOTE
    return lambda: json.loads(file.read_text()) if file.exists() else None


def test_a_restart_saves_leaves_a_note_and_makes_the_step_the_last(run, note):
    one = run({"action": "restart"})
    assert rise(one)["wanted_tp"] == 2.0
    assert (one.trainer.checkpoint_manager.calls, one.trainer.total_training_steps) == (["sleep", f"save {LAST}"], LAST)
    folder = one.trainer.config.trainer.default_local_dir
    overrides = [f"{TP}=2", "trainer.resume_mode=auto", f"trainer.default_local_dir='{folder}'"]
    left = note()
    assert left.pop("reason").startswith("raise TP 1 to 2: ")
    overrides += ["trainer.val_before_train=False", "++rl_accel.tp_replan.min_tp=2"]
    assert left == {"step": LAST, "overrides": overrides}


def test_what_is_saved_already_is_not_saved_again(run, note):
    one = run({"action": "restart"}, {"trainer.save_freq": 5})
    rise(one)
    assert one.trainer.checkpoint_manager.calls == []
    assert note()["step"] == LAST


def test_after_the_last_step_nothing_is_restarted(run, note, caplog):
    one = run({"action": "restart"})
    one.trainer.total_training_steps = LAST
    rise(one)
    assert (one.trainer.checkpoint_manager.calls, note()) == ([], None)
    assert f"step {LAST} is the last" in caplog.text


def test_a_checkpoint_that_cannot_be_saved_wakes_the_servers_and_training_goes_on(run, note, caplog):
    one = run({"action": "restart"})
    one.trainer._save_checkpoint = mock.Mock(side_effect=OSError("no space left on device"))
    assert rise(one)["wanted_tp"] == 2.0
    assert one.trainer.checkpoint_manager.calls == ["sleep", f"wake {LAST}"]
    assert (one.trainer.total_training_steps, note()) == (100, None)
    assert f"step {LAST} could not be saved; going on at the old size" in caplog.text
    assert one.step(LAST + 1, 60)["wanted_tp"] == 1.0, "it is not asked for again at once"
