"""Tests overlap_validation without a cluster: when it submits prompts, and its estimate.

``tests/e2e/test_grpo.py`` has the proof on real verl.
"""

import pkgutil
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from rl_accel.errors import ConfigError
from rl_accel.patches.verl import overlap_validation
from rl_accel.patches.verl.verl_run import VerlRun
from rl_accel.telemetry import metrics

CONFIG = {
    "actor_rollout_ref": {"rollout": {"name": "vllm"}},
    "global_profiler": {"steps": None},
    "trainer": {"test_freq": 1, "total_epochs": 2, "use_v1": True, "v1": {"trainer_mode": "sync"}},
}
VALIDATION = ["first batch", "second batch"]


class Loader:
    """A data loader whose state is the number of fetched batches."""

    fetched = 0

    def state_dict(self):
        return {"fetched": self.fetched}


class Buffer:
    """A replay buffer that polls once for each batch. The rollout of the next step is over by then."""

    def __init__(self):
        self.pending_keys = {"train": set()}
        self.running_keys = {"train": set()}

    def sample(self):
        return self._wait_for_next_poll("val", 0.0)

    def _wait_for_next_poll(self, _partition_id, last_debug_time):
        return last_debug_time


def prepare_step(trainer):
    trainer.train_dataloader.fetched += 1
    trainer.agent_loop_manager.generate_sequences(f"step {trainer.global_steps}")
    return {}


def validate(trainer):
    for batch in VALIDATION:
        trainer.agent_loop_manager.generate_sequences(batch)
        trainer.replay_buffer.sample()
    return {"val": 1.0}


def step(trainer, _logged, _timing):
    trainer.prepare_step()
    return "batch"


@pytest.fixture
def built(monkeypatch):
    """``built(cls, **config)``: a trainer of verl's class ``cls`` in step 3 of 8, and functions that validate and train a step.

    ``trainer.submitted`` has what was submitted, in order.
    """

    def build(cls=PPOTrainerSync, **changed):
        monkeypatch.setattr(cls, "prepare_step", prepare_step)
        trainer = object.__new__(cls)
        trainer.config = OmegaConf.create(CONFIG)
        for key, value in changed.items():
            OmegaConf.update(trainer.config, key, value, force_add=True)
        trainer.global_steps = 3
        trainer.steps_per_epoch = 4
        trainer.total_training_steps = 8
        trainer.train_dataloader = Loader()
        trainer.timing_raw = {"gen": 10.0}
        trainer.submitted = []
        trainer.agent_loop_manager = SimpleNamespace(generate_sequences=trainer.submitted.append)
        trainer.replay_buffer = Buffer()
        patched_validate = overlap_validation._make_validate(validate, None)
        patched_step = overlap_validation._make_step(step, None)
        return trainer, lambda: patched_validate(trainer), lambda: patched_step(trainer, {}, {})

    metrics.drain()
    yield build
    metrics.drain()


def test_the_next_step_follows_the_first_batch_and_is_submitted_once(built):
    trainer, validated, trained = built()
    assert validated() == {"val": 1.0}
    assert trainer.submitted == ["first batch", "step 4", "second batch"]
    assert trainer.global_steps == 3
    assert trainer.train_dataloader.fetched == 1
    assert trainer.train_dataloader.state_dict() == {"fetched": 0}, "a checkpoint saved now"
    trainer.global_steps = 4
    assert trained() == "batch"
    assert trainer.train_dataloader.state_dict() == {"fetched": 1}
    assert len(trainer.submitted) == 3
    trainer.global_steps = 5
    trained()
    assert trainer.submitted[3:] == ["step 5"]


LAST = {"trainer.val_before_train": False, "trainer.val_only": True}


@pytest.mark.parametrize(
    ("changed", "attributes", "is_followed"),
    [
        ({}, {}, True),
        (LAST, {}, True),  # verl reads val_only before training alone
        ({**LAST, "trainer.val_before_train": True}, {}, False),
        ({}, {"total_training_steps": 3}, False),
        ({"trainer.total_epochs": 1}, {}, True),
        ({"trainer.total_epochs": 1}, {"global_steps": 4}, False),
        ({"global_profiler.steps": [3]}, {}, True),
        ({"global_profiler.steps": [4]}, {}, False),
    ],
)
def test_only_a_step_that_comes_is_submitted(built, changed, attributes, is_followed):
    trainer, validated, trained = built(**changed)
    vars(trainer).update(attributes)
    validated()
    assert len(trainer.submitted) == 2 + is_followed
    trainer.global_steps += 1
    trained()
    assert len(trainer.submitted) == 3


@pytest.mark.parametrize("status", ["pending_keys", "running_keys"])
def test_polls_of_the_validation_see_whether_the_rollout_is_over(built, status):
    trainer, validated, _ = built()
    validated()
    assert overlap_validation._trainers[trainer].rollout > 0.0
    getattr(trainer.replay_buffer, status)["train"].add("prompt")
    validated()
    assert overlap_validation._trainers[trainer].rollout is None


class Own(PPOTrainerSync):
    """A user's trainer."""


@pytest.mark.parametrize("name", [overlap_validation._TRAINER, overlap_validation._TAIL_TRAINER])
def test_the_trainers_that_it_knows_by_name_exist(name):
    module, _, cls = name.rpartition(".")
    assert overlap_validation._class_of(object.__new__(pkgutil.resolve_name(f"{module}:{cls}"))) == name


def test_a_subclass_of_the_trainer_is_refused(built):
    overlap_validation.wire(VerlRun(built()[0].config, built()[0]))
    own, *_ = built(Own)
    with pytest.raises(ConfigError, match=r"found .*\.Own \(its own methods are unknown\)"):
        overlap_validation.wire(VerlRun(own.config, own))


def test_the_estimate_is_what_both_would_take_one_after_the_other():
    times = overlap_validation._Times(validation=25.0, ahead=26.0)
    assert times.seconds_saved(rest=18.0) is None, "no rollout began with its step so far"
    times.rollouts_alone.append(40.0)
    # 44 s in place of 40: the validation of 25 s would have taken 22.7 s
    assert times.seconds_saved(rest=18.0) == pytest.approx(25 * 40 / 44 + 40 - 25 - 18)
    times.rollouts_alone.extend([80.0] * 5)  # responses are longer now, and the engines are not slower
    assert times.seconds_saved(rest=54.0) == pytest.approx(80 - 54)
    times.rollouts_alone.extend([10.0] * 5)
    times.rollout = 12.5  # over before the validation
    assert times.seconds_saved(rest=0.0) == pytest.approx(25 / 1.25 + 10 - 25)
    times.rollout = 4.0  # shorter beside the validation than others are alone: its responses are short
    assert times.seconds_saved(rest=0.0) == pytest.approx(4)
