"""``python docs/published_table.py``: compares simulated rollout rounds with what RollPacker (NSDI'26) published for H800 GPUs.

All simulations share one set of constants. Without an option, the program prints the table of docs/benchmarks/plan.md. With
``--fit``, the program first fits the constants of ``docs/published/h800.json`` to the table rows in FITTED with scipy and
prints the constants. ``--scatter 10`` prints the spread of simulated means over ten rounds.
"""

import argparse
import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from rl_accel.features import TailBatchingFlags
from rl_accel.plan.answers import rounds_of, steady
from rl_accel.plan.setup import Setup
from rl_accel.rollout.simulation import EngineModel, Round
from rl_accel.rollout.workload import Lengths

DATA = Path(__file__).parent / "published"
PROMPTS = 128
RESPONSES = 8
RATIOS = {
    "none": (1.0, 1.0),
    "responses_x1.125": (1.0, 1.125),
    "responses_x1.25": (1.0, 1.25),
    "responses_x1.5": (1.0, 1.5),
    "prompts_x1.125": (1.125, 1.0),
    "prompts_x1.25": (1.25, 1.0),
    "prompts_x1.5": (1.5, 1.0),
    "both_x1.25": (1.25, 1.25),
}
"""Mapping from each setting in RollPacker's ablation to two ratios: launched to trained prompts, and launched to trained responses
per prompt."""
CONSTANTS = {
    "qwen2.5": {
        "bandwidth_share": (0.3, 1.0),
        "decoding_flops": (1e13, 9e14),
        "overhead_seconds": (1e-5, 0.02),
        "layer_seconds": (1e-6, 1e-3),
        "alike": (0.02, 0.9),
        "reward_gpu_seconds": (0.05, 5.0),
        "training_flops": (1e13, 1e16),
    },
    "qwen3": {
        "flops": (5e13, 9e14),
        "memory_share": (0.3, 0.9),
        "median_tokens": (500, 20_000),
        "exponent": (0.1, 1.5),
    },
}
"""Lower and upper bounds of the fitted constants, in two groups that are fitted one after the other. The first group holds the
constants of the GPU cluster and is fitted to table rows of Qwen2.5. The second group affects only table rows of Qwen3-8B:
prompt processing after a preemption, memory, and response lengths."""
FITTED = {
    "qwen2.5": {
        *("ablation 8k none", "ablation 8k both_x1.25", "step 7B_8k verl", "step 7B_8k long", "step 14B_16k short"),
        *(f"ablation 16k {name}" for name in ("none", "responses_x1.25", "prompts_x1.25", "both_x1.25")),
    },
    "qwen3": {f"TP 1 {kind} {number}" for kind in ("short", "long") for number in ("preemptions", "seconds")},
}
"""Names of the table rows to which the constants are fitted. The simulation predicts the values of all other rows."""
HOW = {row: "fitted" for rows_ in FITTED.values() for row in rows_}
KEPT_BACK = "ablation 32k"
"""Name prefix of the table rows of a model whose response lengths are not published. The error of these rows may exceed 10 %."""


@dataclass(frozen=True)
class Row:
    """A published number and the simulated number for the same quantity, with the name of the quantity."""

    name: str
    published: float
    simulated: float

    @property
    def off(self) -> float:
        """Relative error of the simulated number."""
        return self.simulated / self.published - 1


_replaced: dict[str, float] = {}
"""Constants that replace those of ``h800.json``, by name."""


def load_data(name: str) -> dict[str, Any]:
    """Returns the content of the JSON file ``name`` in ``docs/published``, which holds published numbers."""
    data: dict[str, Any] = json.loads((DATA / name).read_text())
    model = data.get("models", {}).get("qwen3-8b", {})
    data |= {key: value for key, value in _replaced.items() if key in data and key not in model}
    model |= {key: value for key, value in _replaced.items() if key in model}
    return data


@contextlib.contextmanager
def using(values: Mapping[str, float]) -> Iterator[None]:
    """Replaces constants in the loaded data files by ``values`` inside the ``with`` block."""
    _replaced.update(values)
    try:
        yield
    finally:
        _replaced.clear()


def published(limit: int = 16384, alike: float | None = None) -> Lengths:
    """Returns the response lengths published for mathematics, RollPacker (NSDI'26), Fig. 2a, with the length ``limit`` in tokens.

    The published figure ends at a quarter of the limit of 16,384. From there to the limit, all lengths are assumed equally likely;
    the share of responses at the limit is published. Those have the length ``limit`` here: they were cut off, and nobody knows how
    long they would have been. ``alike`` is the intraclass correlation of the lengths within a prompt; None: the value in the data
    file ``h800.json``.
    """
    data = load_data("response_length_cdf.json")
    figure = data["domains"]["math"]
    tokens = [0, *figure["tokens"], 16384]
    ranks = [0.0, *(share / 100 for share in figure["cum_pct"]), 1 - data["cap_pct"]["math"] / 100]
    quantiles = np.interp((np.arange(20_000) + 0.5) / 20_000, ranks, tokens).round().astype(np.int64)
    lengths = np.where(quantiles == 16384, limit, np.clip(quantiles, 1, limit))
    return Lengths(lengths, load_data("h800.json")["alike"] if alike is None else alike, source=data["source"])


def engine_of_model(model: str, tp: int | None = None) -> EngineModel:
    """Returns the engine model for a replica of the language model ``model`` on ``tp`` H800 GPUs.

    ``tp`` is the tensor-parallel size. None: the size in RollPacker's published runs of this model.
    """
    cluster = load_data("h800.json")
    sizes = cluster["models"][model]
    tp = tp or sizes["tp"]
    weights = 2 * sizes["parameters"]
    bandwidth = cluster["bandwidth"] * cluster["bandwidth_share"] * tp
    exchange = cluster["layer_seconds"] * sizes["layers"] if tp > 1 else 0.0
    floor = cluster["overhead_seconds"] + exchange + weights / bandwidth
    seconds_per_request = weights / (cluster["decoding_flops"] * tp)
    memory = cluster["memory_bytes"] * sizes.get("memory_share", cluster["memory_share"]) * tp
    return EngineModel(
        step_seconds={1: floor + seconds_per_request, 1001: floor + 1001 * seconds_per_request},
        cached_token_seconds=sizes["kv_bytes"] / bandwidth,
        prompt_token_seconds=weights / (cluster["flops"] * tp),
        cache_tokens=max((memory - weights) / sizes["kv_bytes"], 1),
    )


def setup(model: str, tp: int | None = None) -> Setup:
    """Returns the simulation setup for the language model ``model``, with RollPacker's batch (128 prompts x 8 responses) and GPUs.

    The response lengths are the published lengths for mathematics. The reward stage runs outside the rollout. ``tp``:
    tensor-parallel size; None for the published size.
    """
    cluster = load_data("h800.json")
    sizes = cluster["models"][model]
    workload = published(sizes["limit"])
    if "exponent" in sizes:  # the lengths published for a 14B model, rescaled to a fitted median and spread
        tokens = sizes["median_tokens"] * (workload.tokens / np.median(workload.tokens)) ** sizes["exponent"]
        workload = replace(workload, tokens=np.minimum(tokens, sizes["limit"]).astype(np.int64), prompt_tokens=200)
    count = PROMPTS * RESPONSES
    training = 6 * sizes["parameters"] * workload.tokens.mean() * count / cluster["training_flops"] / sizes["gpus"]
    stages = {"update_actor": training, "reward": cluster["reward_gpu_seconds"] * count / sizes["gpus"]}
    replicas = sizes["gpus"] // (tp or sizes["tp"])
    engine = engine_of_model(model, tp)
    return Setup(PROMPTS, RESPONSES, replicas, engine=engine, workload=workload, stages=stages)


def rows(rounds: int = 40, seed: int = 0, only: set[str] | None = None) -> Iterator[Row]:
    """Simulates the quantities that RollPacker (NSDI'26) published, and yields one row per quantity.

    Args:
        rounds: number of simulated rounds per setting.
        seed: seed of the simulation.
        only: names of the wanted rows; None: all rows. Other rows may be yielded too, if they come from the same simulation.
    """
    data = load_data("rollpacker_published.json")
    for column, (model, limit) in enumerate((("7b", "8k"), ("14b", "16k"), ("32b", "32k"))):
        yield from _rows_of_model(data, column, model, limit, rounds=rounds, seed=seed, only=only)
    for tp in (1, 2):
        if only is None or any(name.startswith(f"TP {tp}") for name in only):
            yield from _rows_of_tp(data["tp_preemptions_qwen3_8b_32k_8xH800"], tp, rounds, seed)


def _rows_of_model(
    data: Any, column: int, model: str, limit: str, rounds: int, seed: int, only: set[str] | None
) -> Iterator[Row]:
    """Yields the rows of the ablation and of the step times of one size of Qwen2.5, in ``column`` of the published tables."""
    at = setup(f"qwen2.5-{model}")

    @functools.cache
    def play(name: str) -> list[Round]:
        prompts, responses = RATIOS[name]
        flags = TailBatchingFlags(prompt_ratio=prompts, response_ratio=responses)
        return rounds_of(at, flags, rounds, seed)

    for name in RATIOS:
        row = f"ablation {limit} {name}"
        if only is None or row in only:
            seconds = steady(play(name), PROMPTS, lambda played: played.metrics.rollout_seconds)
            yield Row(row, data["rollout_seconds_ablation"][name][column], seconds)
    whole = f"{model.upper()}_{limit}"
    means = data["step_seconds_mean_of_40"].get(whole)
    if means is None or not (only is None or any(whole in name for name in only)):
        return
    verl = fmean(played.metrics.rollout_seconds for played in play("none")) + sum(at.stages.values())
    yield Row(f"step {whole} verl", means["verl"], verl)
    yield Row(f"step {whole} rlhfuse", means["rlhfuse"], _overlapped(at, play("none")))
    both = play("both_x1.25")
    kinds = {kind: _overlapped(at, [p for p in both if p.metrics.kind == kind]) for kind in ("short", "long")}
    kinds["mean"] = 0.8 * kinds["short"] + 0.2 * kinds["long"]
    for kind, seconds in kinds.items():
        yield Row(f"step {whole} {kind}", means[f"rollpacker_{kind}"], seconds)


def _rows_of_tp(data: Any, tp: int, rounds: int, seed: int) -> Iterator[Row]:
    played = rounds_of(setup("qwen3-8b", tp), TailBatchingFlags(), rounds, seed)
    for kind in ("short", "long"):
        preemptions, seconds = data[f"{kind}_round"][f"tp{tp}"]
        of_kind = [p for p in played if p.metrics.kind == kind]
        yield Row(f"TP {tp} {kind} preemptions", preemptions, fmean(p.preemptions for p in of_kind))
        yield Row(f"TP {tp} {kind} seconds", seconds, fmean(p.metrics.rollout_seconds for p in of_kind))


def _overlapped(at: Setup, played: list[Round]) -> float:
    """Returns the mean seconds of a training step if reward computation and training begin during the rollout.

    When half of the responses are complete, half of the devices begin to train on these responses (as in RollPacker and RLHFuse).
    The other devices finish the rollout. Gradients are applied afterwards.
    """
    trainable = at.training_seconds * (1 - 1 / (PROMPTS * RESPONSES))  # all but the last response
    hidden = [min((p.ends[-1] - p.ends[len(p.ends) // 2]) / 2, trainable) for p in played]
    return fmean(p.metrics.rollout_seconds for p in played) - fmean(hidden) + at.training_seconds


def fit(rounds: int) -> dict[str, float]:
    """Fits the constants named in CONSTANTS to the table rows named in FITTED. Returns the values with the smallest error.

    The error is the sum of the sixth powers of log(simulated / published). ``rounds`` is the number of simulated rounds per
    setting.
    """
    from scipy.optimize import least_squares

    known = load_data("h800.json")
    known = {**known, **known["models"]["qwen3-8b"]}
    values: dict[str, float] = {}
    for part, constants in CONSTANTS.items():

        def error(logarithms: Any, part: str = part) -> list[float]:
            values.update(zip(CONSTANTS[part], np.exp(logarithms).tolist(), strict=True))
            with using(values):
                fitted_rows = [row for row in rows(rounds, only=FITTED[part]) if row.name in FITTED[part]]
            return [(10 * np.log(row.simulated / row.published)) ** 3 for row in fitted_rows]

        low, high = np.log(np.array(list(constants.values()), float)).T
        start = np.clip(np.log([known[name] for name in constants]), low, high)
        best = least_squares(error, start, bounds=(low, high), diff_step=0.02, ftol=0.02, xtol=1e-3, verbose=2)
        values.update(zip(constants, np.exp(best.x).tolist(), strict=True))
    return values


def main() -> None:
    """Parses the options and prints the numbers that RollPacker (NSDI'26) published next to simulated numbers. With ``--scatter``,
    prints the spread of the simulated numbers instead."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", type=int, metavar="ROUNDS", default=0)
    parser.add_argument(
        "--scatter", type=int, metavar="ROUNDS", default=0, help="print the range of 20 means over ROUNDS rounds"
    )
    arguments = parser.parse_args()
    if arguments.scatter:
        for draws in zip(*(rows(arguments.scatter, seed) for seed in range(20)), strict=True):
            low, high = np.quantile([row.simulated for row in draws], [0.025, 0.975])
            print(f"| {draws[0].name} | {draws[0].published:g} | {low:.4g} to {high:.4g} |")
        return
    values = fit(arguments.fit) if arguments.fit else {}
    if values:
        print({name: float(f"{value:.4g}") for name, value in values.items()})
    with using(values):
        for row in rows():
            how = "kept back" if row.name.startswith(KEPT_BACK) else HOW.get(row.name, "predicted")
            print(f"| {row.name} | {row.published:g} | {row.simulated:.4g} | {row.off:+.1%} | {how} |")


if __name__ == "__main__":
    main()
