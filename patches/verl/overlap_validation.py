"""Starts the rollout of the next training step during a validation, in verl's V1 trainer.

A validation and the rollout after it use the same weights, but verl submits the prompts of the next step only after the last
response of the validation. The replacement submits them right after the prompts of the validation, which therefore go first.
TransferQueue keeps both kinds of prompts apart, and metrics, tables and files of the validation keep their step.

Until the next step begins, the data loader answers ``state_dict`` as if the prompts of this step had not been fetched. If a
checkpoint is saved in between, the resumed run fetches them again.

With tail batching, the round that begins during a validation is a long one, which waits for its longest responses as well.
Checkpoints of tail batching hold the prompts of an open round.
"""

import functools
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rl_accel.errors import refuse
from rl_accel.features import TAIL_BATCHING
from rl_accel.patches.patch import Patch
from rl_accel.patches.verl.verl_run import VerlRun
from rl_accel.patches.view import View
from rl_accel.runtime import RUNTIME
from rl_accel.telemetry import metrics

_FLAG = "rl_accel.overlap_validation"
_TRAINER = "verl.trainer.ppo.v1.trainer_sync.PPOTrainerSync"
_TAIL_TRAINER = "rl_accel.integrations.verl.tail_batching.trainer.TailBatchingTrainer"
_ROLLOUTS = 5
"""Number of rollouts that are averaged for ``seconds_saved``. Chosen by hand."""


@dataclass
class _Times:
    """Durations in seconds that one trainer has measured, and the state of its prompts.

    Attributes:
        rollouts_alone: stage ``gen`` of the last steps whose rollout began with the step. Empty with tail batching.
        submitted: ``perf_counter`` time at which the prompts of the next step were submitted; None if they were not.
        validation: last validation.
        rollout: rollout that began during the last validation and was over before the end of the validation; None otherwise.
        ahead: part of the current step's rollout that passed before the step.
    """

    rollouts_alone: deque[float] = field(default_factory=lambda: deque(maxlen=_ROLLOUTS))
    submitted: float | None = None
    validation: float = 0.0
    rollout: float | None = None
    ahead: float = 0.0

    def seconds_saved(self, rest: float) -> float | None:
        """Returns the estimated seconds saved by the rollout of the current step; None without a rollout to compare it with.

        A validation and a rollout that share the engines are both slower than alone. The estimate assumes that both are slower by
        the same factor, which is known for the rollout. A rollout that is shorter than others has short responses.

        ``rest``: seconds that the step waited for the rest of its rollout.
        """
        if not self.rollouts_alone:
            return None
        rollout = self.ahead + rest if self.rollout is None else self.rollout
        rollout_alone = min(fmean(self.rollouts_alone), rollout)
        validation_alone = self.validation * rollout_alone / rollout
        return validation_alone + rollout_alone - self.validation - rest


_trainers: weakref.WeakKeyDictionary[Any, _Times] = weakref.WeakKeyDictionary()


def ahead_seconds(trainer: Any) -> float:
    """Returns the seconds of the current step's rollout that passed before the step, during a validation of ``trainer``."""
    return _trainers[trainer].ahead if trainer in _trainers else 0.0


def wire(run: VerlRun, _flags: Any = None) -> None:
    """Checks that a validation of ``run`` can overlap with the rollout after it. Changes nothing.

    Raises:
        ConfigError: the trainer or a setting conflicts with the feature.
    """
    if run.trainer is not None and (found := _class_of(run.trainer)) not in (_TRAINER, _TAIL_TRAINER):
        refuse(_FLAG, "the trainer", _TRAINER, found, "its own methods are unknown")
    if run.get("reward.reward_model.enable") and not run.get("reward.reward_model.enable_resource_pool"):
        reason = "a colocated reward model stops the rollout servers during a validation"
        refuse(_FLAG, "reward.reward_model.enable_resource_pool", True, False, reason)
    if sampler := run.get("trainer.v1.sampler.custom_sampler.path"):
        refuse(
            _FLAG, "trainer.v1.sampler.custom_sampler", None, sampler, "it may take both kinds of prompts for its own"
        )
    if not RUNTIME.flags()[TAIL_BATCHING].enable:
        run.require_off(
            _FLAG, "algorithm.filter_groups.enable", "which prompts are launched depends on when verl looks"
        )
    run.require_off(_FLAG, "skip.rollout_tq.enable", "it stores rollouts by the step in which they begin")


def _class_of(trainer: Any) -> str:
    return f"{type(trainer).__module__}.{type(trainer).__qualname__}"


def _has_next_step(trainer: Any) -> bool:
    """Returns True if ``fit`` trains another step after this validation, and does not profile the rollout of that step."""
    config = trainer.config.trainer
    step = trainer.global_steps
    if config.get("val_before_train", True) and config.get("val_only", False):
        return False
    if step + 1 in (trainer.config.global_profiler.steps or ()):
        return False  # verl starts the profiler of the rollout servers when the step begins
    is_last_epoch_over = step // trainer.steps_per_epoch >= config.total_epochs
    return bool(step < trainer.total_training_steps and not is_last_epoch_over)


def _submit_next_step(trainer: Any) -> None:
    if _class_of(trainer) == _TAIL_TRAINER:
        trainer.begin_early(trainer.global_steps + 1)
        return
    state = trainer.train_dataloader.state_dict()
    trainer.global_steps += 1
    try:
        trainer.prepare_step()
    finally:
        trainer.global_steps -= 1
    trainer.train_dataloader.state_dict = lambda: state


def _make_validate(original: Any, _settings: Any) -> Any:
    def validate(self: Any) -> Any:
        times = _trainers.setdefault(self, _Times())
        times.rollout = None
        if not _has_next_step(self):
            return original(self)
        manager = self.agent_loop_manager
        buffer = self.replay_buffer

        def submit_both(prompts: Any) -> Any:
            result = manager.generate_sequences(prompts)
            if times.submitted is None:
                times.submitted = time.perf_counter()
                _submit_next_step(self)
            return result

        def look_and_wait(*args: Any, **kwargs: Any) -> Any:
            # verl has just looked at the prompts of the validation and of the step
            is_over = not (buffer.pending_keys["train"] or buffer.running_keys["train"])
            if is_over and times.submitted is not None and times.rollout is None:
                times.rollout = time.perf_counter() - times.submitted
            return buffer._wait_for_next_poll(*args, **kwargs)

        sample = functools.partial(type(buffer).sample, View(buffer, _wait_for_next_poll=look_and_wait))
        both = View(manager, generate_sequences=submit_both)
        started = time.perf_counter()
        result = original(View(self, agent_loop_manager=both, replay_buffer=View(buffer, sample=sample)))
        times.validation = time.perf_counter() - started
        return result

    return validate


def _make_step(original: Any, _settings: Any) -> Any:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        times = _trainers.setdefault(self, _Times())
        times.ahead = 0.0
        if times.submitted is None:
            batch = original(self, *args, **kwargs)
            if _class_of(self) != _TAIL_TRAINER:
                times.rollouts_alone.append(self.timing_raw["gen"])
            return batch
        times.ahead = time.perf_counter() - times.submitted
        times.submitted = None
        vars(self.train_dataloader).pop("state_dict", None)
        batch = original(View(self, prepare_step=dict), *args, **kwargs)
        metrics.put("overlap_validation/ahead_seconds", times.ahead)
        saved = times.seconds_saved(self.timing_raw["gen"])
        if saved is not None:
            metrics.put("overlap_validation/seconds_saved", saved)
        return batch

    return step


_NO_SEAM = "verl's trainer calls no plug-in between the submission of a validation and its last response"
_REMOVE_WHEN = "verl submits the next prompts before it waits for a validation"

SWITCHES = (
    Patch(
        name="verl.overlap_validation.validate",
        target="verl.trainer.ppo.v1.trainer_base:PPOTrainer._validate",
        supports="verl>=0.9.1",
        params=("self",),
        make=_make_validate,
        fingerprints=("08fb78cf8cd0553a7c05037b1b236a38ad8bb97a0635e7d5476af6aec9da7d20",),
        uses=("agent_loop_manager", "generate_sequences", "replay_buffer", "sample"),
        no_seam=_NO_SEAM,
        remove_when=_REMOVE_WHEN,
    ),
    Patch(
        name="verl.overlap_validation.step",
        target="verl.trainer.ppo.v1.trainer_base:PPOTrainer.step",
        supports="verl>=0.9.1",
        params=("self", "metrics", "timing_raw"),
        make=_make_step,
        fingerprints=("48a37abc04e69ae0e7add476c7b684223abd43a1a406c5265a7636311552caa4",),
        uses=("prepare_step",),
        no_seam=_NO_SEAM,
        remove_when=_REMOVE_WHEN,
    ),
)
