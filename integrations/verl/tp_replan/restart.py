"""Ends a run so that another launch goes on with it at another size: a checkpoint by verl's own saving, and a normal end."""

import logging
import os
from typing import Any

from rl_accel.integrations.ray import restart_note
from rl_accel.integrations.verl.tp_replan.wiring import TP_KEY
from rl_accel.parallel.tp_decisions import Decision

logger = logging.getLogger("rl_accel")


def restart(trainer: Any, step: int, decision: Decision) -> bool:
    """Save ``step``, leave word for the driver, and make it the last step of this launch.

    verl's V1 trainers read ``total_training_steps`` before every step, and end as after the last one: trackers are finished, and
    nothing raises. Called between steps, when a checkpoint is the same as the trainer's own at the end of the step.

    Returns:
        Whether the run ends. It does not if there is no step left, or nothing could be saved (one line says so).
    """
    last = min(trainer.total_training_steps, trainer.steps_per_epoch * trainer.config.trainer.total_epochs)
    if step >= last:
        logger.warning("rl-accel: tp_replan: step %d is the last, nothing is restarted", step)
        return False
    try:
        if not _saved_already(trainer, step):
            _save(trainer)
        overrides = overrides_for(trainer, decision)
        restart_note.publish({"step": step, "tp": decision.tp, "overrides": overrides, "reason": decision.reason})
    except Exception:  # of storage, of workers: training goes on at the old size
        logger.warning(
            "rl-accel: tp_replan: no restart, step %d could not be saved; going on at the old size", step, exc_info=True
        )
        return False
    trainer.total_training_steps = step
    logger.warning(
        "rl-accel: tp_replan: step %d is saved; this launch ends, the next one: %s", step, " ".join(overrides)
    )
    return True


def overrides_for(trainer: Any, decision: Decision) -> list[str]:
    """Return what the next launch needs on verl's command line. The folder of checkpoints may be one named by the time of day."""
    folder = os.path.abspath(trainer.config.trainer.default_local_dir).replace("\\", "\\\\").replace("'", "\\'")
    return [
        f"{TP_KEY}={decision.tp}",
        "trainer.resume_mode=auto",
        f"trainer.default_local_dir='{folder}'",
        "trainer.val_before_train=False",
    ]


def _saved_already(trainer: Any, step: int) -> bool:
    every = trainer.config.trainer.save_freq
    return bool(every > 0 and step % every == 0)


def _save(trainer: Any) -> None:
    # As verl does it: with the servers asleep, whose memory saving may need.
    trainer.checkpoint_manager.sleep_replicas()
    try:
        trainer._save_checkpoint()
    except BaseException:
        trainer.checkpoint_manager.update_weights(trainer.global_steps)  # wakes them as after each step
        raise
