"""Models of rollout engines whose speed is derived from published numbers instead of measurements."""

from rl_accel.errors import RlAccelError
from rl_accel.parallel.model_memory import MIN_SEQUENCES
from rl_accel.rollout.simulation import EngineModel
from rl_accel.rollout.workload import load

SIZES = (1, 2, 4, 8)
"""Tensor-parallel sizes that fit in a node, in GPUs."""


def engines(model: str) -> dict[int, EngineModel]:
    """Returns engine models for the language model ``model``, by tensor-parallel size. The published size comes first.

    Sizes with too small a key-value cache are left out.
    """
    usual = load("h800.json")["models"].get(model, {}).get("tp")
    found = {size: engine(model, size) for size in (usual, *SIZES)}
    longest = load("h800.json")["models"][model]["limit"]
    return {size: one for size, one in found.items() if one.cache_tokens > MIN_SEQUENCES * longest}


def engine(model: str, tp: int | None = None) -> EngineModel:
    """Returns the engine model for a replica of the language model ``model`` on ``tp`` H800 GPUs.

    The default of ``tp`` is the published number of GPUs. In this model, a decoding step reads weights and cache from memory, and
    computes for each request. With several GPUs, each layer waits for all GPUs.

    Raises:
        RlAccelError: no constants are known for the model.
    """
    cluster = load("h800.json")
    if model not in cluster["models"]:
        raise RlAccelError(f"--step-seconds: wanted one of {', '.join(cluster['models'])}, found {model!r}")
    its = cluster["models"][model]
    tp = tp or its["tp"]
    rate, weights = cluster["bandwidth"] * cluster["bandwidth_share"] * tp, 2 * its["parameters"]
    waits = cluster["layer_seconds"] * its["layers"] * (tp > 1)
    floor, token = cluster["overhead_seconds"] + waits + weights / rate, weights / (cluster["decoding_flops"] * tp)
    reading = weights / (cluster["flops"] * tp)
    cache = (cluster["memory_bytes"] * its.get("memory_share", cluster["memory_share"]) * tp - weights) / its[
        "kv_bytes"
    ]
    return EngineModel(
        {1: floor + token, 1001: floor + 1001 * token}, its["kv_bytes"] / rate, reading, cache_tokens=max(cache, 1)
    )
