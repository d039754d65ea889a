"""Makes responses with a seed movable too, and makes vLLM's servers print which responses they stop.

On the CPU platform all responses have a seed, and vLLM goes on with other tokens than without a move.
"""

import dataclasses

from rl_accel.integrations.verl import engines
from rl_accel.integrations.verl.balance.client import MOVABLE

VLLM = engines._ENGINES["vllm"]


def stop(server, request_id):
    print(f"stopped {request_id}", flush=True)
    VLLM.stop(server, request_id)


MOVABLE.add("seed")
engines.register("vllm", dataclasses.replace(VLLM, stop=stop))
