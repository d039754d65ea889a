"""Loaded by verl into every process of a run. Kills a rollout engine before the trainer updates its critic in step 5.

``KILLED_WHILE_TRAINING`` is a part of the command line of the process that gets SIGKILL.
"""

import asyncio
import contextlib
import os
import signal
import time
from types import ModuleType
from typing import Any

import psutil

from rl_accel.post_import import when_imported

STEP = 5


def kill_one(victim: str) -> None:
    """SIGKILL to one process of this run whose command line has ``victim`` in it."""
    run = os.environ["VERL_FILE_LOGGER_PATH"]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if victim in " ".join(process.cmdline()) and process.environ().get("VERL_FILE_LOGGER_PATH") == run:
                process.send_signal(signal.SIGKILL)
                return
    raise RuntimeError(f"no process {victim}")


def install(module: ModuleType) -> None:
    from rl_accel.integrations.verl.tail_batching.trainer_servers import find_dead

    update_critic = module.PPOTrainer._update_critic

    def killing(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if trainer.global_steps == STEP:
            kill_one(os.environ["KILLED_WHILE_TRAINING"])
            while not asyncio.run(find_dead(trainer._servers._manager.get_replicas())):
                time.sleep(0.05)  # an update of the weights before its server knows would end the run
        return update_critic(trainer, *args, **kwargs)

    module.PPOTrainer._update_critic = killing


when_imported("verl.trainer.ppo.v1.trainer_base", install)
