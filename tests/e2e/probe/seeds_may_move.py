"""Makes responses with a seed movable too, and makes vLLM's servers write which responses they stop to the file STOPPED.

On the CPU platform all responses have a seed, and vLLM goes on with other tokens than without a move.
"""

import dataclasses
import os
from pathlib import Path

from rl_accel.integrations.verl import engines
from rl_accel.integrations.verl.balance.client import MOVABLE

VLLM = engines._ENGINES["vllm"]


def stop(server, request_id):
    with Path(os.environ.get("STOPPED", os.devnull)).open("a") as file:
        file.write(f"{request_id}\n")
    VLLM.stop(server, request_id)


MOVABLE.add("seed")
engines.register("vllm", dataclasses.replace(VLLM, stop=stop))
