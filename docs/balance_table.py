"""``python docs/balance_table.py``: prints the table of docs/benchmarks/balance.md, simulated speedups of rollouts by ``balance``.

Below the table stands an upper bound of the speedup, which no schedule can exceed.

The simulated run has 64 prompts of 16 responses on four replicas, each a 14B model on one H800, with the published response lengths
of mathematics (limit 16,384). Each prompt is used in two epochs. Only in the second epoch does ``balance`` know earlier lengths.
The simulation runs the scheduling code of real runs.
"""

import math
import statistics
from collections import defaultdict
from dataclasses import replace

import numpy as np

from rl_accel.features import BalanceFlags
from rl_accel.plan.balanced import BalancedCluster
from rl_accel.plan.fit import engine_of_model
from rl_accel.rollout import workload
from rl_accel.rollout.balance import Balance, end_bound_at_arrival
from rl_accel.rollout.simulation import Cluster
from rl_accel.rollout.workload import Floats

PROMPTS, RESPONSES, REPLICAS, SEEDS, PROMPT_TOKENS = 64, 16, 4, 3, 200
ARMS = {"late": (False, False, 0), "order": (True, False, 0), "moves": (True, False, 2), "known": (False, True, 0)}
"""Settings of each variant of ``balance``: whether prompts with long responses begin first, whether all lengths are known, and the
maximum number of moves of a response."""
COLUMNS = {
    "late": ("late", 0),
    "order": ("order", 0),
    "order, 2nd epoch": ("order", 1),
    "moves": ("moves", 0),
    "moves, 2nd epoch": ("moves", 1),
    "lengths known": ("known", 1),
}
"""Mapping from column of the table to the variant in ARMS and the epoch (from 0) whose speedup over stock the column shows."""
DRAWS = 100
"""Number of random draws of response lengths over which the bounds are averaged. Chosen by hand."""


def play(cluster: Cluster, lengths: Floats) -> float:
    """Simulates a rollout on an idle ``cluster`` and returns its seconds. ``lengths``: tokens of each response, shape [P, R]."""
    began = cluster.now
    prompts = np.repeat(np.arange(len(lengths)), lengths.shape[1])
    cluster.launch(range(lengths.size), lengths.ravel().tolist(), prompts=prompts.tolist())
    while len(cluster):
        cluster.happen()
    return cluster.now - began


def bounds(lengths: Floats, slots: int) -> tuple[float, float]:
    """Returns two upper bounds of the speedup over stock for ``lengths``, if a replica is equally fast at any load.

    The first bound is for a schedule that does not know the lengths. The best that such a schedule can do is to generate all
    responses to the same length, until only as many responses as slots are left. The second bound is for known lengths.
    """
    stock_seconds = end_bound_at_arrival([(0.0, length) for length in lengths.ravel()], REPLICAS, slots)
    ascending, slots = np.sort(lengths, axis=None), REPLICAS * slots
    together, longest = ascending[-slots - 1], ascending[-1]
    unknown = np.minimum(ascending, together).sum() / slots + longest - together
    return stock_seconds / unknown, stock_seconds / max(ascending.sum() / slots, longest)


def print_bounds(slots: int) -> None:
    """Prints both :func:`bounds`, each as the mean of DRAWS random draws of lengths."""
    rng = np.random.default_rng(0)
    drawn = [workload.published("math16k").lengths(range(PROMPTS), RESPONSES, rng) for _ in range(DRAWS)]
    unknown, known = np.mean([bounds(lengths.astype(float), slots) for lengths in drawn], axis=0)
    print(f"\nBounds, {slots} slots a replica: {unknown:.2f} without knowing lengths, {known:.2f} with all known.")


def row(slots: int, cache: float) -> str:
    """Returns a row of the table. Each replica has ``slots`` slots and a cache of ``cache`` tokens."""
    replica = replace(engine_of_model("qwen2.5-14b"), slots=slots, cache_tokens=cache)
    seconds, moves = defaultdict(list), []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        load = workload.published("math16k")
        epochs = [load.lengths(range(PROMPTS), RESPONSES, rng) for _ in range(2)]
        for epoch, lengths in enumerate(epochs):
            seconds["stock", epoch].append(play(Cluster(replica, REPLICAS, PROMPT_TOKENS), lengths))
        for arm, (ordered, known, most) in ARMS.items():
            core = Balance(slots, BalanceFlags(max_moves=most), ordered)
            balanced = BalancedCluster(replica, REPLICAS, PROMPT_TOKENS, core)  # kept for both epochs
            for epoch, lengths in enumerate(epochs):
                descending = np.sort(lengths, axis=None)[::-1][:, None]
                seconds[arm, epoch].append(play(balanced, descending if known else lengths))
                moves += [core.take_numbers()["moves"]] if most else []
    mean = {key: statistics.fmean(values) for key, values in seconds.items()}
    stock = statistics.fmean((mean["stock", 0], mean["stock", 1]))
    cells = [f"{mean['stock', epoch] / mean[arm, epoch]:.2f}" for arm, epoch in COLUMNS.values()]
    name = f"{slots}" if cache == math.inf else f"{slots}, cache of {cache:,.0f} tokens"
    return f"| {name} | {stock:.0f} | {' | '.join(cells)} | {statistics.fmean(moves):.0f} |"


def main() -> None:
    """Prints the table in Markdown, and the bounds."""
    print(f"| slots a replica | stock, s | {' | '.join(COLUMNS)} | moves a rollout |")
    print("|---" * (len(COLUMNS) + 3) + "|")
    for slots, cache in ((16, math.inf), (32, math.inf), (64, math.inf), (256, math.inf), (256, 50_000.0)):
        print(row(slots, cache), flush=True)
    print_bounds(16)


if __name__ == "__main__":
    main()
