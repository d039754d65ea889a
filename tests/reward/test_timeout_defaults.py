"""Tests the default values of the timeout policy by replaying published durations, without processes.

All responses of a prompt begin together. Limits are those of the moment in which an execution ends or is stopped, as the executor
gives them to executions that are running.
"""

from collections import defaultdict

import pytest

from rl_accel.features import RewardTimeoutFlags
from rl_accel.lab.bench.reward import workload
from rl_accel.reward.adaptive_timeout import AdaptiveTimeout


def replay(responses=8, epochs=1, spread=0.3, probes=0.0, seeds=3, prompts=120, caution=2.0, **flags):
    """Return how many times less than with a fixed limit executions take in all, and the share of correct answers stopped."""
    fixed = ours = killed = correct = 0.0
    for seed in range(seeds):
        policy = AdaptiveTimeout(RewardTimeoutFlags(probe_share=probes, maximum=30.0, **flags), caution=caution)
        for batch in workload(prompts, responses, epochs, prompts, 1.0, spread, seed=seed):
            groups = defaultdict(list)
            for response in batch:
                groups[response.prompt].append((response.seconds or 1e9, response.correct))
            for prompt, group in groups.items():
                before = policy.limit(prompt)
                for seconds, right in sorted(group):
                    limit = policy.learned(prompt) if before.reason == "learning" else before
                    fixed += min(seconds, 30.0)
                    ours += min(seconds, limit.wall)
                    correct += right
                    if seconds <= limit.wall:
                        policy.record(prompt, seconds, seconds, right)
                    else:
                        killed += right
    return fixed / ours, killed / correct


def test_one_correct_result_saves_much_more_than_three_and_kills_no_more():
    one, killed_by_one = replay(epochs=2)
    three, killed_by_three = replay(epochs=2, min_correct=3, caution=0.0)
    assert one > 2.8
    assert one > 1.2 * three
    assert killed_by_one <= killed_by_three <= 0.001


def test_caution_keeps_correct_answers_alive_and_costs_little():
    careful, killed = replay(spread=0.5)
    careless, killed_carelessly = replay(spread=0.5, caution=0.0)
    assert killed < 0.002 < killed_carelessly
    assert careful > 0.9 * careless


def test_bounds_of_the_policy():
    larger_groups, _ = replay(responses=16)  # were every hanging program stopped after ``minimum``, it would be 3.3
    assert larger_groups == pytest.approx(3.15, abs=0.25)
    _, killed = replay(spread=1.0)  # over a factor of five, up or down: the limit is wrong for one in fifty
    assert 0.01 < killed < 0.05
