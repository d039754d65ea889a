"""Loaded by verl into every process of a run. Records SGLang's own counters before the trainer updates its actor.

One JSON line a step, in ``$SGLANG_COUNTERS``: the number of requests on each server, those that wait included.
"""

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx

from rl_accel.post_import import when_imported


def install(module: ModuleType) -> None:
    update_actor = module.PPOTrainer._update_actor

    def counting(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        addresses = [replica.server_address for replica in trainer._servers._manager.get_replicas()]
        loads = [load for a in addresses for load in httpx.get(f"http://{a}/get_load", timeout=60).json()]
        with Path(os.environ["SGLANG_COUNTERS"]).open("a") as file:
            file.write(json.dumps([load["num_reqs"] for load in loads]) + "\n")
        return update_actor(trainer, *args, **kwargs)

    module.PPOTrainer._update_actor = counting


when_imported("verl.trainer.ppo.v1.trainer_base", install)
