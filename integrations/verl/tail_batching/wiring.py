"""Puts tail batching into the configuration of an unchanged sync recipe, or says why it cannot work; registers its trainer."""

import functools
import sys
from dataclasses import asdict
from typing import Any

from omegaconf import OmegaConf, open_dict

from rl_accel.errors import refuse
from rl_accel.features import TailBatchingFlags
from rl_accel.integrations.verl import agent_loop
from rl_accel.integrations.verl.tail_batching import FLAG, MODE, WORKER_PART, run_of
from rl_accel.patches.seams import Registration, Seams

SEAMS: Seams = {
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer.prepare_step": ("self",),
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ": None,
    "verl.trainer.ppo.v1:PPOTrainerSync": None,
}
"""verl 0.9.1 has them."""
_refuse = functools.partial(refuse, FLAG)
_MODE_KEY = "trainer.v1.trainer_mode"


def wire(config: Any, flags: TailBatchingFlags) -> None:
    """Choose our trainer mode and agent-loop manager in ``config`` (verl's, changed in place). Idempotent.

    Raises:
        ConfigError: something in ``config`` cannot go together with tail batching, or quotas do not fit the batch.
    """
    check(config)
    with open_dict(config):
        OmegaConf.update(config, _MODE_KEY, MODE)
        config.data.gen_batch_size = 1
        # The trainer process builds its settings from here, whatever source the flags had.
        OmegaConf.update(config, "trainer.v1." + MODE, asdict(flags), merge=False)
    agent_loop.choose(config, WORKER_PART)
    run_of(config)


def refuse_unwired(config: Any) -> None:
    """Stop a trainer that was chosen before anyone could wire this feature.

    Raises:
        ConfigError: its driver has not called ``validate_config``, or it is one without these seams.
    """
    mode = OmegaConf.select(config, _MODE_KEY, default=None)
    if mode != MODE:
        _refuse(
            _MODE_KEY,
            MODE,
            mode,
            "verl's validate_config sets it, which the driver must call before the trainer starts",
        )


def check(config: Any) -> None:
    """Refuse what tail batching cannot work with.

    Raises:
        ConfigError: names the key, what is wanted and what was found.
    """

    def get(key: str, default: Any = None) -> Any:
        return OmegaConf.select(config, key, default=default)

    if get("trainer.v1") is None:
        import verl

        _refuse("verl", "0.9.1 or later with its V1 trainer", verl.__version__)
    if not get("trainer.use_v1", True):
        _refuse("trainer.use_v1", True, get("trainer.use_v1"))
    mode = get(_MODE_KEY)
    if mode not in ("sync", MODE):
        _refuse(_MODE_KEY, "sync", mode, "it is strictly on-policy; an asynchronous trainer has no tail to cut off")
    if get(f"trainer.v1.{mode}.parameter_sync_step", 1) != 1:
        _refuse(f"trainer.v1.{mode}.parameter_sync_step", 1, get(f"trainer.v1.{mode}.parameter_sync_step"))
    sampler = get("trainer.v1.sampler.custom_sampler.name") or get("trainer.v1.sampler.custom_sampler.path")
    if sampler:
        _refuse("trainer.v1.sampler.custom_sampler", None, sampler, "the trainer samples from rounds")
    agent_loop.check(config, FLAG, "responses must run in workers that can cancel them")
    if get("actor_rollout_ref.rollout.full_determinism", False):
        reason = "what is trained on depends on which responses finish first"
        _refuse("actor_rollout_ref.rollout.full_determinism", False, True, reason)
    if get("skip.rollout_tq.enable", False):
        _refuse("skip.rollout_tq.enable", False, True, "there is no batch of prompts to replay")
    colocated = get("reward.reward_model.enable", False) and not get("reward.reward_model.enable_resource_pool", False)
    if colocated and get("algorithm.filter_groups.enable", False):
        _refuse("reward.reward_model.enable_resource_pool", True, False, "groups are filtered as they complete")
    batch = get("data.train_batch_size")
    users = [("actor_rollout_ref.actor.ppo_mini_batch_size", True)]
    users.append(("critic.ppo_mini_batch_size", get("critic.enable") or get("algorithm.adv_estimator") == "gae"))
    for key, used in users:
        if used and batch % get(key):
            _refuse(key, f"a divisor of data.train_batch_size = {batch}", get(key), "a batch is never padded")


def _modes() -> dict[str, type]:
    """verl's registry. Not imported here: its state is asked for by any thread, while another may be importing it."""
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
