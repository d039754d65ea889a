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

    Called between steps, when a checkpoint is the same as the trainer's own at the end of the step.

    Returns:
        Whether the run ends. It does not if there is no step left, or nothing could be saved (one line says so).
    """
    if is_last(trainer, step):
        logger.warning("rl-accel: tp_replan: step %d is the last, nothing is restarted", step)
        return False
    try:
        _save(trainer, step)
        _publish(trainer, step, decision.tp, decision.reason)
    except Exception:  # of storage, of workers: training goes on at the old size
        logger.warning(
            "rl-accel: tp_replan: no restart, step %d could not be saved; going on at the old size", step, exc_info=True
        )
        return False
    return True


def end(trainer: Any, step: int, tp: int, reason: str) -> None:
    """As :func:`restart`, for a run that cannot go on. If it cannot be saved, the next launch begins at the last checkpoint."""
    logger.error("rl-accel: tp_replan: the run cannot go on after step %d: %s", step, reason)
    try:
        _save(trainer, step)
    except Exception:
        logger.exception(
            "rl-accel: tp_replan: step %d could not be saved, steps since the last checkpoint are lost", step
        )
    _publish(trainer, step, tp, reason)


def is_last(trainer: Any, step: int) -> bool:
    """Return whether the run has no step after this one."""
    return bool(
        step >= min(trainer.total_training_steps, trainer.steps_per_epoch * trainer.config.trainer.total_epochs)
    )


def _publish(trainer: Any, step: int, tp: int, reason: str) -> None:
    """Have this be the last step. verl's V1 trainers read ``total_training_steps`` before every step.

    They end as after any last step: trackers are finished, and nothing raises.
    """
    overrides = overrides_for(trainer, tp)
    restart_note.publish({"step": step, "tp": tp, "overrides": overrides, "reason": reason})
    trainer.total_training_steps = step
    logger.warning("rl-accel: tp_replan: this launch ends after step %d, the next one: %s", step, " ".join(overrides))


def overrides_for(trainer: Any, tp: int) -> list[str]:
    """Return what the next launch needs on verl's command line. The folder of checkpoints may be one named by the time of day."""
    folder = os.path.abspath(trainer.config.trainer.default_local_dir).replace("\\", "\\\\").replace("'", "\\'")
    return [
        f"{TP_KEY}={tp}",
        "trainer.resume_mode=auto",
        f"trainer.default_local_dir='{folder}'",
        "trainer.val_before_train=False",
    ]


def _saved_already(trainer: Any, step: int) -> bool:
    every = trainer.config.trainer.save_freq
    return bool(every > 0 and step % every == 0)


def _save(trainer: Any, step: int) -> None:
    if not _saved_already(trainer, step):
        _save_now(trainer)
    logger.warning("rl-accel: tp_replan: step %d is saved", step)


def _save_now(trainer: Any) -> None:
    # As verl does it: with the servers asleep, whose memory saving may need.
    trainer.checkpoint_manager.sleep_replicas()
    try:
        trainer._save_checkpoint()
    except BaseException:
        trainer.checkpoint_manager.update_weights(trainer.global_steps)  # wakes them as after each step
        raise
