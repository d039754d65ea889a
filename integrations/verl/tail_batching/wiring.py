"""Sets up tail batching in the configuration of a verl run of trainer mode ``sync``, or refuses the run with a reason.

Also registers the trainer mode ``tail_batching`` in verl.
"""

import functools
import sys
from typing import Any

from rl_accel.errors import refuse
from rl_accel.features import TailBatchingFlags
from rl_accel.integrations.verl import agent_loop
from rl_accel.integrations.verl.tail_batching import FLAG, GEN_BATCH_KEPT, MODE, WORKER_PART, run_of
from rl_accel.log import warn_once
from rl_accel.patches.seams import Registration
from rl_accel.patches.verl.verl_run import VerlRun
from rl_accel.rollout import saved

_refuse = functools.partial(refuse, FLAG)
_MODE_KEY = "trainer.v1.trainer_mode"
_GEN_BATCH_KEY = "data.gen_batch_size"


def wire(run: VerlRun, flags: TailBatchingFlags) -> None:
    """Sets the trainer mode ``tail_batching`` and rl-accel's agent-loop manager in the configuration of ``run``. Idempotent.

    Raises:
        ConfigError: a setting conflicts with tail batching.
        ResumeError: the checkpoint to resume from was saved without tail batching.
    """
    run.require_chosen(FLAG, _MODE_KEY, MODE)
    check(run)
    if run.in_driver and run.checkpoint_to_resume:
        saved.state_file(run.checkpoint_to_resume / saved.FOLDER)
    run.set(_MODE_KEY, MODE)
    if run.get(GEN_BATCH_KEPT) is None:
        run.set(GEN_BATCH_KEPT, run.get(_GEN_BATCH_KEY) or run.get("data.train_batch_size"))
    if (size := run.get(_GEN_BATCH_KEY, 1)) != 1:
        warn_once(
            _GEN_BATCH_KEY,
            "rl-accel: tail_batching replaces %s = %s by 1: rounds take single prompts",
            _GEN_BATCH_KEY,
            size,
        )
    run.set(_GEN_BATCH_KEY, 1)
    agent_loop.choose(run, WORKER_PART)
    run_of(run.config, flags)


def check(run: VerlRun) -> None:
    """Refuses a configuration that tail batching does not support.

    Raises:
        ConfigError: the message names the configuration key, the wanted value and the value found.
    """
    steps = f"trainer.v1.{run.get(_MODE_KEY)}.parameter_sync_step"
    if run.get(steps, 1) != 1:
        _refuse(steps, 1, run.get(steps))
    if run.get("algorithm.adv_estimator") == "remax":
        _refuse("algorithm.adv_estimator", "another", "remax", "verl's V1 trainer generates no baseline for it")
    sampler = run.get("trainer.v1.sampler.custom_sampler.name") or run.get("trainer.v1.sampler.custom_sampler.path")
    if sampler:
        _refuse("trainer.v1.sampler.custom_sampler", None, sampler, "the trainer samples from rounds")
    agent_loop.check(run, FLAG, "responses must run in workers that can cancel them")
    reason = "what is trained on depends on which responses finish first"
    run.require_off(FLAG, "actor_rollout_ref.rollout.full_determinism", reason)
    run.require_off(FLAG, "skip.rollout_tq.enable", "there is no batch of prompts to replay")
    colocated = run.get("reward.reward_model.enable") and not run.get("reward.reward_model.enable_resource_pool")
    if colocated and run.filters_groups:
        _refuse("reward.reward_model.enable_resource_pool", True, False, "groups are filtered as they complete")
    batch = run.get("data.train_batch_size")
    for model in ("actor_rollout_ref.actor", *(["critic"] if run.has_critic else [])):
        if batch % (size := run.get(f"{model}.ppo_mini_batch_size")):
            wanted = f"a divisor of data.train_batch_size = {batch}"
            _refuse(f"{model}.ppo_mini_batch_size", wanted, size, "a batch is never padded")


def _modes() -> dict[str, type]:
    """Returns verl's registry of trainer classes, by trainer mode; {} before verl's trainer module is imported."""
    # No import here, because another thread may be importing the module.
    modes: dict[str, type] = getattr(sys.modules.get("verl.trainer.ppo.v1.trainer_base"), "TRAINER_REGISTRY", {})
    return modes


def _register(_settings: Any) -> None:
    from verl.trainer.ppo.v1 import register_trainer

    from rl_accel.integrations.verl.tail_batching.trainer import TailBatchingTrainer

    register_trainer(MODE)(TailBatchingTrainer)


SWITCHES = (
    Registration(
        name="verl.trainer_mode.tail_batching",
        target=f"verl.trainer.ppo.v1:TRAINER_REGISTRY[{MODE}]",
        register=_register,
        unregister=lambda: _modes().pop(MODE, None),
        owner="rl_accel.integrations.verl.tail_batching.trainer",
        find=lambda: _modes().get(MODE),
    ),
)
