"""Models of rollout engines whose speed is derived from published numbers instead of measurements."""

from rl_accel.errors import RlAccelError
from rl_accel.rollout.simulation import EngineModel
from rl_accel.rollout.workload import load_data


def engine_of_model(model: str, tp: int | None = None) -> EngineModel:
    """Returns the engine model for a replica of the language model ``model`` on ``tp`` H800 GPUs.

    If ``tp`` is None, it is the TP size of RollPacker's published runs of this model.

    Raises:
        RlAccelError: no constants are known for the model.
    """
    cluster = load_data("h800.json")
    if model not in cluster["models"]:
        raise RlAccelError(f"--step-seconds: wanted one of {', '.join(cluster['models'])}, found {model!r}")
    sizes = cluster["models"][model]
    tp = tp or sizes["tp"]
    rate, weights = cluster["bandwidth"] * cluster["bandwidth_share"] * tp, 2 * sizes["parameters"]
    waits = cluster["layer_seconds"] * sizes["layers"] * (tp > 1)
    floor, token = cluster["overhead_seconds"] + waits + weights / rate, weights / (cluster["decoding_flops"] * tp)
    reading = weights / (cluster["flops"] * tp)
    memory = cluster["memory_bytes"] * sizes.get("memory_share", cluster["memory_share"]) * tp
    cache = (memory - weights) / sizes["kv_bytes"]
    paces = {1: floor + token, 1001: floor + 1001 * token}
    return EngineModel(paces, sizes["kv_bytes"] / rate, reading, cache_tokens=max(cache, 1))
