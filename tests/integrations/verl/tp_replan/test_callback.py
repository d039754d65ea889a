"""The callback is fed the numbers of steps by hand: what it decides, logs, saves and, with action=restart, does to the trainer."""

import json
from types import SimpleNamespace

import pytest

from rl_accel.features.tp_replan import TpReplanFlags
from rl_accel.integrations.ray import restart_note
from rl_accel.integrations.verl.tp_replan import STATE_FILE, callback
from rl_accel.integrations.verl.tp_replan.callback import TpReplan, kind_of, tokens_of
from rl_accel.telemetry.server_counters import Reading

QUICK = {"enable": True, "confirm_steps": 1, "least_reference": 1.0}
TP = "actor_rollout_ref__rollout__tensor_model_parallel_size"


class Manager:
    """Stands for verl's checkpoint manager and the saving of its trainer: says what was called in which order."""

    def __init__(self):
        self.calls = []

    def sleep_replicas(self):
        self.calls.append("sleep")

    def update_weights(self, step):
        self.calls.append(f"wake {step}")


@pytest.fixture
def run(configure, monkeypatch):
    """``run(flags, **keys)``: a trainer with one server, and ``step(number, preemptions)`` that shows a step to the callback."""
    total = SimpleNamespace(value=0)
    monkeypatch.setattr(
        callback,
        "read_servers",
        lambda engine, servers, reset_peak: {"s": None if total.value is None else Reading(total.value)},
    )

    def make(flags=None, **keys):
        trainer = SimpleNamespace(
            config=configure(**keys),
            llm_server_manager=SimpleNamespace(server_addresses=["s"]),
            checkpoint_manager=Manager(),
            total_training_steps=100,
            steps_per_epoch=10**6,
            global_steps=0,
        )
        trainer._save_checkpoint = lambda: trainer.checkpoint_manager.calls.append(f"save {trainer.global_steps}")
        told = TpReplan(TpReplanFlags(**{**QUICK, **(flags or {})}), lambda: trainer)

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
            found = told(number, data)
            return {name.removeprefix("tp_replan/"): value for name, value in found.items()}

        return SimpleNamespace(step=step, trainer=trainer, told=told, total=total)

    return make


def rise(run, first=1):
    """Four steps, the last of which has many more preemptions than the others."""
    return [run.step(first + i, count) for i, count in enumerate((2, 2, 2, 60))][-1]


def test_advice_is_one_line_and_leaves_the_trainer_alone(run, caplog):
    one = run()
    assert rise(one) == {"tp": 1.0, "wanted_tp": 2.0, "preemptions": 60.0, "changes": 0.0}
    lines = [record.getMessage() for record in caplog.records if "tp_replan" in record.getMessage()]
    assert [line for line in lines if "advice" in line] == [lines[-1]]
    assert "advice after step 4: raise TP 1 to 2: preemptions are 30.00 times their reference" in lines[-1]
    assert "expected:" in lines[-1]
    assert "\n" not in lines[-1]
    assert one.trainer.checkpoint_manager.calls == []
    assert one.trainer.total_training_steps == 100
    assert one.step(5, 60)["wanted_tp"] == 1.0


def test_unknown_preemptions_decide_nothing_and_are_not_logged_as_a_number(run):
    one = run()
    for number in range(1, 12):
        assert one.step(number, None) == {"tp": 1.0, "wanted_tp": 1.0, "changes": 0.0}


def test_preemptions_of_validation_are_not_taken_for_those_of_a_step(run):
    one = run()
    one.total.value = 500  # those of the validation before the first step
    one.told(0, {"val-core/acc": 0.5})
    assert one.step(1, 2)["preemptions"] == 2.0
    assert "preemptions" not in one.step(2, 80, **{"val-core/acc": 0.5})
    assert one.step(3, 0, **{"val-core/acc": 0.5})["preemptions"] == 0.0, "none at all is none of the step's"


def test_numbers_that_are_missing_cost_one_warning(run, caplog):
    one = run()
    for number in (1, 2):
        assert one.step(number, 0, **{"timing_s/gen": None})["wanted_tp"] == 1.0
    assert caplog.text.count("tp_replan decides nothing: step 1 has no timing_s/gen") == 1


def test_kind_and_tokens_come_from_tail_batching_where_it_is_on():
    tail = "rl_accel/tail_batching/"
    assert kind_of({}) == "all"
    assert kind_of({tail + "short_round": 1.0, tail + "long_round": 0.0}) == "short"
    assert kind_of({tail + "short_round": 0.0, tail + "long_round": 1.0}) == "long"
    assert kind_of({tail + "short_round": 0.0, tail + "long_round": 0.0, tail + "final_round": 1.0}) == "all"
    usual = {"perf/total_num_tokens": 1000, "response_length/mean": 75.0, "prompt_length/mean": 25.0}
    assert tokens_of(usual) == 750
    assert tokens_of({**usual, tail + "tokens_generated": 912.0}) == 912
    assert tokens_of({}) is None


@pytest.fixture
def notes(monkeypatch):
    left = []
    monkeypatch.setattr(restart_note, "publish", left.append)
    return left


def test_a_restart_saves_leaves_a_note_and_makes_the_step_the_last(run, notes):
    one = run({"action": "restart"})
    assert rise(one)["wanted_tp"] == 2.0
    assert one.trainer.checkpoint_manager.calls == ["sleep", "save 4"]
    assert one.trainer.total_training_steps == 4
    folder = one.trainer.config.trainer.default_local_dir
    (note,) = notes
    assert (note["step"], note["tp"]) == (4, 2)
    assert note["overrides"] == [
        f"{TP.replace('__', '.')}=2",
        "trainer.resume_mode=auto",
        f"trainer.default_local_dir='{folder}'",
        "trainer.val_before_train=False",
    ]


def test_what_is_saved_already_is_not_saved_again(run, notes):
    one = run({"action": "restart"}, trainer__save_freq=2)
    rise(one)
    assert one.trainer.checkpoint_manager.calls == []
    assert len(notes) == 1


def test_after_the_last_step_nothing_is_restarted(run, notes, caplog):
    one = run({"action": "restart"})
    one.trainer.total_training_steps = 4
    rise(one)
    assert (one.trainer.checkpoint_manager.calls, notes) == ([], [])
    assert "step 4 is the last, nothing is restarted" in caplog.text


def test_a_checkpoint_that_cannot_be_saved_wakes_the_servers_and_training_goes_on(run, notes, caplog):
    one = run({"action": "restart"})

    def full():
        raise OSError("no space left on device")

    one.trainer._save_checkpoint = full
    assert rise(one)["wanted_tp"] == 2.0
    assert one.trainer.checkpoint_manager.calls == ["sleep", "wake 4"]
    assert (one.trainer.total_training_steps, notes) == (100, [])
    assert "step 4 could not be saved; going on at the old size" in caplog.text
    assert one.step(5, 60)["wanted_tp"] == 1.0, "it is not asked for again at once"


def test_the_planners_state_goes_along_with_a_resumed_run_and_not_with_a_new_one(run, notes, tmp_path, caplog):
    rise(run({"action": "restart"}))
    file = tmp_path / "checkpoints" / STATE_FILE
    assert json.loads(file.read_text())["step"] == 4
    resumed = run({"action": "restart"}, **{TP: 2})
    assert resumed.step(5, 0)["changes"] == 1.0, "what was wanted is what it runs at"
    assert run({"action": "restart"}, **{TP: 2}).step(1, 0)["changes"] == 0.0
    file.write_text("{")
    assert run({"action": "restart"}, **{TP: 2}).step(5, 0)["changes"] == 0.0
    assert "begins anew" in caplog.text


def test_without_a_trainer_there_is_nothing_to_say():
    assert TpReplan(TpReplanFlags(enable=True), lambda: None)(1, {"training/global_step": 1}) == {}
