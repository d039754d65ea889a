"""Engines whose speed was not measured here but follows from published numbers."""

import math

from rl_accel.errors import RlAccelError
from rl_accel.plan.workload import load
from rl_accel.rollout.simulation import Engine


def engine(model: str, tp: int = 1) -> Engine:
    """Return a replica of ``model`` on ``tp`` H800: a step reads weights and cache from memory, and computes for each request.

    Raises:
        RlAccelError: no constants are known for the model.
    """
    cluster = load("h800.json")
    if model not in cluster["models"]:
        raise RlAccelError(f"--step-seconds: wanted one of {', '.join(cluster['models'])}, found {model!r}")
    its, rate = cluster["models"][model], cluster["bandwidth"] * cluster["bandwidth_share"] * tp
    weights, token = 2 * its["parameters"], 2 * its["parameters"] / (cluster["flops"] * tp)
    floor = cluster["overhead_seconds"] + cluster["tensor_parallel_seconds"] * (tp > 1) + weights / rate
    share = its.get("memory_share")  # known to bound the cache in one table only
    cache = (cluster["memory_bytes"] * share * tp - weights) / its["kv_bytes"] if share else math.inf
    return Engine({1: floor + token, 1001: floor + 1001 * token}, its["kv_bytes"] / rate, token, cache_tokens=cache)
