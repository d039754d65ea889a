"""Registers the trainer mode where verl looks modes up: in the trainer process, once its trainers are imported."""

import sys
from typing import Any

from rl_accel.errors import PatchRefused
from rl_accel.integrations.verl.tail_batching import MODE
from rl_accel.patches.registration import Registration


def _registry() -> dict[str, type]:
    from verl.trainer.ppo.v1 import trainer_base

    return trainer_base.TRAINER_REGISTRY


def _find() -> Any:
    # Not imported here: the state is asked for by any thread, and another one may be about to import this very module.
    trainer_base = sys.modules.get("verl.trainer.ppo.v1.trainer_base")
    return getattr(trainer_base, "TRAINER_REGISTRY", {}).get(MODE)


def _register(_settings: Any) -> None:
    from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer

    if not hasattr(PPOTrainerSync, "prepare_step"):
        raise PatchRefused("tail batching wants a verl whose trainers have prepare_step (0.9.1), found none")
    from rl_accel.integrations.verl.tail_batching.trainer import TailBatchingTrainer

    register_trainer(MODE)(TailBatchingTrainer)


SWITCHES = (
    Registration(
        name="verl.trainer_mode.tail_batching",
        feature="tail_batching",
        target=f"verl.trainer.ppo.v1:TRAINER_REGISTRY[{MODE}]",
        register=_register,
        unregister=lambda: _registry().pop(MODE, None),
        owner="rl_accel.integrations.verl.tail_batching.trainer",
        find=_find,
    ),
)
