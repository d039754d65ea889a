"""What was published of RollPacker (NSDI'26) on an H800 cluster, simulated: one set of constants, fitted to some rows."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from rl_accel.errors import RlAccelError
from rl_accel.features import TailBatchingFlags
from rl_accel.plan.answers import hidden_seconds, rounds_of, steady
from rl_accel.plan.setup import Setup
from rl_accel.plan.workload import load, published
from rl_accel.rollout.simulation import Engine, Round

PROMPTS, RESPONSES = 128, 8
RATIOS = {
    "none": (1.0, 1.0),
    "responses_x1.25": (1.0, 1.25),
    "prompts_x1.25": (1.25, 1.0),
    "prompts_x1.5": (1.5, 1.0),
    "both_x1.25": (1.25, 1.25),
}
"""Of prompts and responses, by row of the ablation."""
FITTED = {"ablation 8k none", "ablation 16k none", "ablation 16k responses_x1.25", "ablation 16k prompts_x1.25"}
FITTED |= {
    "ablation 8k both_x1.25",
    "step 7B_8k short",
    "step 14B_16k short",
    "TP 1 short seconds",
    "TP 1 long preemptions",
}
FITTED |= {"TP 2 short preemptions"}
"""Rows that constants were fitted to, by hand; the others are predicted."""
_ROUNDS = 20


@dataclass(frozen=True)
class Row:
    """A published number and the simulated one."""

    name: str
    published: float
    simulated: float

    @property
    def off(self) -> float:
        """Relative error."""
        return self.simulated / self.published - 1


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


def setup(model: str, tp: int = 1) -> Setup:
    """Return the published batch on ``model``, with mathematics of the published lengths."""
    its = load("h800.json")["models"][model]
    workload = published("math16k")
    if "exponent" in its:  # another model: as published for a 14B model, but for median and spread
        tokens = its["median_tokens"] * (workload.tokens / np.median(workload.tokens)) ** its["exponent"]
        workload = replace(workload, tokens=tokens.astype(np.int64), prompt_tokens=200)
    stages = {"update_actor": its.get("other_seconds", 0.0)}
    replicas = its["replicas"] // tp
    return Setup(PROMPTS, RESPONSES, replicas, engine(model, tp), workload.limited(its["limit"]), stages)


def rows(rounds: int = _ROUNDS, seed: int = 0) -> Iterator[Row]:
    """Simulate each published row, in the order of the file."""
    data = load("rollpacker_published.json")
    for column, (model, limit) in enumerate((("7b", "8k"), ("14b", "16k"))):
        at = setup(f"qwen2.5-{model}")
        found: dict[str, list[Round]] = {}
        for name, (prompts, responses) in RATIOS.items():
            flags = TailBatchingFlags(prompt_ratio=prompts, response_ratio=responses)
            found[name] = rounds_of(at, flags, rounds, seed)
            seconds = steady(found[name], PROMPTS, lambda played: played.metrics.rollout_seconds)
            yield Row(f"ablation {limit} {name}", data["rollout_seconds_ablation"][name][column], seconds)
        means = data["step_seconds_mean_of_40"][f"{model.upper()}_{limit}"]
        plain, both = found["none"], found["both_x1.25"]
        verl = fmean(played.metrics.rollout_seconds for played in plain) + at.training_seconds
        yield Row(f"step {model.upper()}_{limit} verl", means["verl"], verl)
        yield Row(f"step {model.upper()}_{limit} rlhfuse", means["rlhfuse"], _overlapped(at, plain))
        kinds = {kind: _overlapped(at, [p for p in both if p.metrics.kind == kind]) for kind in ("short", "long")}
        kinds["mean"] = 0.8 * kinds["short"] + 0.2 * kinds["long"]
        for kind, seconds in kinds.items():
            yield Row(f"step {model.upper()}_{limit} {kind}", means[f"rollpacker_{kind}"], seconds)
    for tp in (1, 2):
        played = rounds_of(setup("qwen3-8b", tp), TailBatchingFlags(), rounds, seed)
        for kind in ("short", "long"):
            preemptions, seconds = data["tp_preemptions_qwen3_8b_32k_8xH800"][f"{kind}_round"][f"tp{tp}"]
            its = [p for p in played if p.metrics.kind == kind]
            yield Row(f"TP {tp} {kind} preemptions", preemptions, fmean(p.preemptions for p in its))
            yield Row(f"TP {tp} {kind} seconds", seconds, fmean(p.metrics.rollout_seconds for p in its))


def _overlapped(at: Setup, played: list[Round]) -> float:
    """Mean seconds of a step whose training begins during the rollout."""
    return fmean(p.metrics.rollout_seconds - hidden_seconds(at, p) for p in played) + at.training_seconds
