"""Compares the automatic ratio of tail batching with brute force on published lengths."""

import math

import numpy as np
import pytest

from rl_accel.rollout.tail_ratio import CompletionTimes
from rl_accel.rollout.workload import published


class Simulation:
    """Rounds by the paper's rule, written anew. Responses of a prompt are as much ``alike`` as :class:`Lengths` says."""

    def __init__(self, P0, R0, response_ratio, alike, seed=0):
        self.P0, self.R0, self.surplus = P0, R0, math.ceil(R0 * response_ratio)
        self.workload, self.rng = published("math16k", alike), np.random.default_rng(seed)
        self.queue = np.empty(0, int)
        self.seconds, self.trained, self.begun = 0.0, 0, 0

    def times(self, prompts, count):
        """Completion times of ``count`` responses of each prompt, sorted; one token takes 10 ms."""
        return np.sort(self.workload.lengths(prompts, count, self.rng) / 100, axis=1)

    def run(self, ratio, rounds, observe=None):
        for _ in range(rounds):
            if len(self.queue) >= self.P0:
                times = self.times(self.queue[: self.P0], self.R0)
                self.queue = self.queue[self.P0 :]
                self.seconds += times[:, -1].max()
                if observe:
                    rank = round(self.R0 * (self.R0 + 1) / (self.surplus + 1))
                    for of_prompt in times:
                        observe.add_long(of_prompt[-1], of_prompt[rank - 1])
            else:
                new = self.begun + np.arange(round(ratio * self.P0))
                self.begun += len(new)
                done = self.times(new, self.surplus)[:, self.R0 - 1]
                order = done.argsort()
                end = done[order[self.P0 - 1]]
                self.seconds += end
                self.queue = np.append(self.queue, new[order[self.P0 :]])
                if observe:
                    for seconds in done[order[: self.P0]]:
                        observe.add_short(seconds, completed=True)
                    for _ in order[self.P0 :]:
                        observe.add_short(end, completed=False)
            self.trained += self.P0
        return self.seconds / self.trained


@pytest.mark.parametrize("alike", [0.0, 0.64], ids=["bad luck", "hard prompts"])
@pytest.mark.parametrize("response_ratio", [1.0, 1.25])
def test_the_automatic_ratio_is_near_the_best_of_all(response_ratio, alike):
    P0, R0 = 32, 4
    grid = [1 + i / 16 for i in range(17)]
    costs = {ratio: Simulation(P0, R0, response_ratio, alike).run(ratio, 600) for ratio in grid}
    times = CompletionTimes(P0)
    ratio, observed = 1.25, Simulation(P0, R0, response_ratio, alike, seed=1)
    for _ in range(4):
        observed.run(ratio, 25, observe=times)
        ratio = times.best_ratio(1.25)
    chosen = Simulation(P0, R0, response_ratio, alike).run(ratio, 600)
    assert chosen <= 1.08 * min(costs.values())
    assert chosen < 0.75 * costs[1.0]


def test_waiting_for_all_is_estimated_from_rounds_that_never_did():
    stock = Simulation(32, 8, 1.0, 0.64).run(1.0, 300) * 32
    times = CompletionTimes(32)
    Simulation(32, 8, 1.0, 0.64, seed=1).run(1.25, 60, observe=times)
    assert times.full_wait() == pytest.approx(stock, rel=0.1)


def observed(P0, short, long):
    times = CompletionTimes(P0)
    for seconds in short:
        times.add_short(seconds, completed=True)
    for seconds in long:
        times.add_long(seconds, seconds)
    return times


def test_the_automatic_ratio_waits_for_the_first_long_round_needs_a_tail_and_is_limited():
    times = observed(4, range(4), [])
    times.add_short(3.0, completed=False)
    assert times.best_ratio(1.25) == 1.25
    assert times.full_wait() is None
    for _ in range(4):
        times.add_long(50.0, 50.0)
    assert times.best_ratio(1.25) > 1.0
    assert times.full_wait() > 3.0
    no_tail = observed(8, [5.0] * 64, [5.0] * 64)
    assert no_tail.best_ratio(1.25) == 1.0
    assert no_tail.full_wait() == pytest.approx(5.0)
    assert observed(8, [1000.0, 1.0] * 320, [1000.0] * 640).best_ratio(1.25, limit=1.5) <= 1.5
