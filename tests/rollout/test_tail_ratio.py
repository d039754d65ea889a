"""Compares the automatic ratio of tail batching with other ratios, in simulated rounds of published lengths."""

import statistics

import pytest

from rl_accel.features import TailBatchingFlags
from rl_accel.rollout.simulation import EngineModel, play_rounds
from rl_accel.rollout.tail_batching import TailRun
from rl_accel.rollout.tail_ratio import CompletionTimes
from rl_accel.rollout.workload import published

RATIOS = (1.0, 1.0625, 1.125, 1.25, 1.5, 2.0)


def play(rounds, prompt_ratio, response_ratio, alike, responses=4, seed=0):
    """Metrics of rounds that train 32 prompts of ``responses`` responses, which are ``alike`` as :class:`Lengths` says."""
    run = TailRun(32, responses, TailBatchingFlags(prompt_ratio=prompt_ratio, response_ratio=response_ratio))
    return [p.metrics for p in play_rounds(run, EngineModel({1: 0.01}), 1, published("math16k", alike), rounds, seed)]


@pytest.mark.parametrize("alike", [0.0, 0.64], ids=["bad luck", "hard prompts"])
@pytest.mark.parametrize("response_ratio", [1.0, 1.25])
def test_the_automatic_ratio_is_near_the_best_of_all(response_ratio, alike):
    rounds = [play(120, ratio, response_ratio, alike)[30:] for ratio in (*RATIOS, "auto")]  # it learns first
    *others, chosen = [statistics.fmean(metrics.rollout_seconds for metrics in played) for played in rounds]
    assert chosen <= 1.08 * min(others)
    assert chosen < 0.75 * others[0]


def test_waiting_for_all_is_estimated_from_rounds_that_never_did():
    stock = statistics.fmean(metrics.rollout_seconds for metrics in play(300, 1.0, 1.0, 0.64, 8))
    last = play(60, 1.25, 1.0, 0.64, 8, seed=1)[-1]
    assert last.seconds_saved + last.rollout_seconds == pytest.approx(stock, rel=0.1)


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
