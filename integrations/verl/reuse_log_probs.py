"""Checks verl's configuration for the feature ``reuse_log_probs``: ``+rl_accel.reuse_log_probs.enable=True``.

The feature itself are the patches :mod:`rl_accel.patches.verl.reuse_log_probs`, in the trainer's process, and
:mod:`rl_accel.patches.verl.reuse_in_worker`, in the processes that train the actor.
"""

import inspect
from typing import Any

from rl_accel.errors import refuse
from rl_accel.features import LosslessFlags
from rl_accel.patches.verl import trials
from rl_accel.patches.verl.reuse_in_worker import FLAG, require_no_jump
from rl_accel.patches.verl.verl_run import RAY_TRAINER_CLASS, ROLLOUT, VerlRun

_ACTOR = "actor_rollout_ref.actor"
_CORRECTION = "algorithm.rollout_correction"
_OFF = {
    "algorithm.use_kl_in_reward": "the penalty needs old log-probabilities before the update",
    "distillation.enabled": "its loss was not tried",
    f"{_ACTOR}.calculate_sum_pi_squared": "verl's forward pass computes it",
    f"{_ACTOR}.fsdp_config.qat.enable": "quantisation observes each forward pass",
    f"{_ACTOR}.megatron.dynamic_context_parallel": "a response is split among ranks",
    f"{ROLLOUT}.enable_rollout_routing_replay": "experts of a forward pass are replayed in the update",
    "actor_rollout_ref.model.mtp.enable": "its training was not tried",
}
"""Boolean keys of verl's configuration that must be off, with the reasons."""

_METHODS = {
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer"): (
        "_compute_old_log_prob",
        "_compute_advantage",
        "_update_actor",
        "_step_once",
    ),
    RAY_TRAINER_CLASS: ("_compute_old_log_prob", "_update_actor", "fit"),
}
"""Mapping from verl's trainer classes to the methods that must be verl's own."""


def wire(run: VerlRun, _flags: LosslessFlags) -> None:
    """Checks that nothing in ``run`` needs old log-probabilities before the update. Changes nothing.

    In the trainer process, also tries the policy loss, if verl's registry of policy losses has it in that process.

    Raises:
        ConfigError: something needs old log-probabilities before the update, or was not tried.
    """
    if run.get(f"{_CORRECTION}.bypass_mode", False):
        return  # verl computes no old log-probabilities, as VerlRun.idle says
    if (strategy := run.get(f"{_ACTOR}.strategy")) not in ("fsdp", "fsdp2", "megatron"):
        refuse(FLAG, f"{_ACTOR}.strategy", "fsdp, fsdp2 or megatron", strategy, "others were not tried")
    for key, reason in _OFF.items():
        run.require_off(FLAG, key, reason)
    for key in (f"{_CORRECTION}.rollout_is", f"{_CORRECTION}.rollout_rs"):
        if value := run.get(key):
            refuse(FLAG, key, None, value, "it needs old log-probabilities before the update")
    mode_key = f"{_ACTOR}.{strategy}.router_replay.mode"
    if (mode := run.get(mode_key, "disabled")) != "disabled":
        refuse(FLAG, mode_key, "disabled", mode, "experts of a forward pass are replayed in the update")
    _check_estimator(run)
    if not run.in_driver:
        _check_trainer(run.trainer)
        if loss := trials.loss_of(run):
            require_no_jump(loss)


def _check_estimator(run: VerlRun) -> None:
    """Refuses an advantage estimator that takes old log-probabilities."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    name = run.get("algorithm.adv_estimator")
    try:
        parameters = inspect.signature(get_adv_estimator_fn(name)).parameters
    except ValueError:  # registered in the trainer's process alone, which checks again
        return
    if "old_log_probs" in parameters:
        refuse(FLAG, "algorithm.adv_estimator", "one without old log-probabilities", name)


def _check_trainer(built: Any) -> None:
    """Refuses a trainer whose class replaces a method of verl's between the forward pass and the update."""
    bases = {(base.__module__, base.__qualname__): base for base in type(built).__mro__}
    for verls, names in _METHODS.items():
        for name in names if verls in bases else ():
            if getattr(type(built), name) is not getattr(bases[verls], name):
                refuse(FLAG, f"{name} of the trainer", f"that of {verls[1]}", type(built).__name__, "others may differ")
