"""``python docs/balance_table.py``: prints the table of docs/balance.md, seconds of rollouts with and without balance, simulated,
and below it what no schedule can do better, calculated.

64 prompts of 16 responses on four replicas, with the published lengths of mathematics (limit 16,384) and a 14B model on one H800
each. Prompts come twice; the first epoch knows nothing of them. The state machine is that of production.
"""

import math
import statistics

import numpy as np

from rl_accel.features import BalanceFlags
from rl_accel.plan import published, workload
from rl_accel.rollout.balance import Balance, end_bound_at_arrival
from rl_accel.rollout.simulation import Cluster, Engine, Floats

PROMPTS, RESPONSES, REPLICAS, SEEDS, PROMPT_TOKENS = 64, 16, 4, 3, 200
TICK = 1.0
DRAWS = 100
"""Of lengths, for the calculated bounds."""


def bound_at_arrival(engine: Engine, lengths: Floats) -> float:
    """Return the seconds of a rollout of ``lengths``, shape [P, R], by verl's balancer."""
    cluster = Cluster(engine, REPLICAS, PROMPT_TOKENS)
    cluster.launch(range(lengths.size), lengths.ravel().tolist())
    while len(cluster):
        cluster.happen()
    return cluster.now


class Rollouts:
    """Rollouts by ``core``, one after the other: it learns."""

    def __init__(self, engine: Engine, core: Balance) -> None:
        self.cluster, self.core, self.moves, self.errors = Cluster(engine, REPLICAS, PROMPT_TOKENS), core, 0, []
        self.had, self.lengths, self.parts, self.part_of = {}, {}, {}, {}
        for number in range(REPLICAS):
            core.add_replica(str(number), 0.0, engine.cache_tokens)

    def play(self, lengths: Floats) -> float:
        """Return the seconds of one."""
        cluster, core = self.cluster, self.core
        began, tick = cluster.now, cluster.now + TICK
        self.lengths, self.had = dict(enumerate(lengths.ravel().tolist())), dict.fromkeys(range(lengths.size), 0)
        for number in self.lengths:
            prompt = number // lengths.shape[1]
            self.carry_out(core.request(str(number), began, str(prompt), prompt_tokens=PROMPT_TOKENS))
        while len(core):
            if tick < cluster.next_event():
                cluster.now = tick
                self.carry_out(core.tick(tick))
                tick += TICK
            elif ended := cluster.happen():
                number = self.parts[ended.id]
                self.carry_out(core.over(str(number), cluster.now, ended.length - self.had[number]))
        numbers = core.take_numbers()
        self.moves += numbers["moves"]
        self.errors.append(numbers.get("length_error_p50", math.nan))
        return cluster.now - began

    def carry_out(self, decisions) -> None:
        cluster = self.cluster
        for ticket, replica, stop in decisions:
            number = int(ticket)
            if stop:
                (tokens,) = cluster.cancel([self.part_of[number]])
                part = min(tokens, self.lengths[number] - 1) - self.had[number]
                self.had[number] += part
                self.carry_out(self.core.again(ticket, cluster.now, part))
            else:
                part = self.part_of[number] = len(self.parts)
                self.parts[part] = number
                cluster.launch([part], [self.lengths[number]], [float(self.had[number])], replicas=[int(replica)])


def bounds(lengths: Floats, places: int) -> tuple[float, float]:
    """Return how many times faster than stock a rollout of ``lengths`` can be, at the same pace whatever runs.

    First without knowing lengths: all are brought as far as only so many go beyond as there are places, and then these run side by
    side. Until then no place was free, and there is no reason to bring one farther than another. Then with all lengths known.
    """
    stock = end_bound_at_arrival([(0.0, length) for length in lengths.ravel()], REPLICAS, places)
    ascending, places = np.sort(lengths, axis=None), REPLICAS * places
    far, longest = ascending[-places - 1], ascending[-1]
    unknown = np.minimum(ascending, far).sum() / places + longest - far
    return stock / unknown, stock / max(ascending.sum() / places, longest)


def print_bounds(places: int) -> None:
    """Print the mean :func:`bounds` of many draws."""
    rng = np.random.default_rng(0)
    drawn = [workload.published("math16k").lengths(range(PROMPTS), RESPONSES, rng) for _ in range(DRAWS)]
    unknown, known = np.mean([bounds(lengths.astype(float), places) for lengths in drawn], axis=0)
    print(f"\nBounds, {places} places a replica: {unknown:.2f} without knowing lengths, {known:.2f} with all known.")


def main() -> None:
    """Print the table in Markdown, and the bounds."""
    columns = (
        "places a replica",
        "stock, s",
        "late",
        "order",
        "order, 2nd epoch",
        "moves",
        "moves, 2nd epoch",
        "lengths known",
    )
    print(f"| {' | '.join(columns)} | moves a rollout |")
    print("|---" * (len(columns) + 1) + "|")
    engine = published.engine("qwen2.5-14b")
    arms = {
        "late": (False, False, 0),
        "order": (True, False, 0),
        "moves": (True, False, 2),
        "known": (False, True, 0),
    }
    for places, cache in ((16, math.inf), (32, math.inf), (64, math.inf), (256, math.inf), (256, 50_000.0)):
        its = Engine(engine.step_seconds, engine.cached_token_seconds, engine.prompt_token_seconds, 0.0, places, cache)
        seconds = {}
        moves = []
        for seed in range(SEEDS):
            rng = np.random.default_rng(seed)
            load = workload.published("math16k")
            epochs = [load.lengths(range(PROMPTS), RESPONSES, rng) for _ in range(2)]
            for epoch, lengths in enumerate(epochs):
                seconds.setdefault(("stock", epoch), []).append(bound_at_arrival(its, lengths))
            for arm, (ordered, known, most) in arms.items():
                played = Rollouts(its, Balance(places, BalanceFlags(max_moves=most), ordered))
                for epoch, lengths in enumerate(epochs):
                    given = np.sort(lengths, axis=None)[::-1][:, None] if known else lengths
                    seconds.setdefault((arm, epoch), []).append(played.play(given))
                moves += [played.moves / 2] if most else []
        mean = {key: statistics.fmean(values) for key, values in seconds.items()}
        stock = [mean["stock", 0], mean["stock", 1]]
        cells = [("late", 0), ("order", 0), ("order", 1), ("moves", 0), ("moves", 1), ("known", 1)]
        shown = " | ".join(f"{stock[epoch] / mean[arm, epoch]:.2f}" for arm, epoch in cells)
        name = f"{places}" if cache == math.inf else f"{places}, cache of {cache:,.0f} tokens"
        print(f"| {name} | {statistics.fmean(stock):.0f} | {shown} | {statistics.fmean(moves):.0f} |", flush=True)
    print_bounds(16)


if __name__ == "__main__":
    main()
