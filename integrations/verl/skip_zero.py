"""Checks verl's configuration for the feature ``skip_zero``: ``+rl_accel.skip_zero.enable=True``.

The feature itself is the patch :mod:`rl_accel.patches.verl.skip_zero`, which works in the processes that train the actor.
"""

from rl_accel.errors import refuse
from rl_accel.features import LosslessFlags
from rl_accel.patches.verl import skip_zero, trials
from rl_accel.patches.verl.verl_run import VerlRun

_FLAG = "rl_accel.skip_zero"
_ACTOR = "actor_rollout_ref.actor"


def wire(run: VerlRun, _flags: LosslessFlags) -> None:
    """Checks that rows (responses) with advantage 0 have no influence on the training of ``run``. Changes nothing.

    In the trainer process, also tests the policy loss with random rows, if verl's registry of policy losses has it in that process.

    Raises:
        ConfigError: a setting gives rows with advantage 0 an influence, or the training engine is untested.
    """
    if (strategy := run.get(f"{_ACTOR}.strategy")) not in ("fsdp", "fsdp2"):
        refuse(_FLAG, f"{_ACTOR}.strategy", "fsdp or fsdp2", strategy, "others were not tried")
    if (weight := run.get(f"{_ACTOR}.entropy_coeff", 0)) != 0:
        refuse(_FLAG, f"{_ACTOR}.entropy_coeff", 0, weight, "it trains every response")
    run.require_off(_FLAG, f"{_ACTOR}.use_kl_loss", "it trains every response")
    run.require_off(_FLAG, f"{_ACTOR}.calculate_entropy", "actor/entropy_loss is a mean over all rows")
    run.require_off(_FLAG, "distillation.enabled", "it trains every response")
    if not run.in_driver and (loss := trials.loss_of(run)):
        skip_zero.require_loss_ignores_zeros(loss)
