"""Tests the default values of the timeout policy by replaying published durations, without processes.

All responses of a prompt begin together. Limits are those of the moment in which an execution ends or is stopped, as the executor
gives them to executions that are running.
"""

import random
from collections import defaultdict

import numpy as np
import pytest

from rl_accel.features import RewardTimeoutFlags
from rl_accel.reward.adaptive_timeout import AdaptiveTimeout

HANGING = 0.0505
"""Share of executions that hit a fixed limit of 30 s, read from Fig. 7a of RollPacker (NSDI'26)."""
# fmt: off
SECONDS = (
    0.116, 0.147, 0.164, 0.185, 0.2, 0.252, 0.29, 0.361, 0.393, 0.441, 0.489, 0.565, 0.652, 0.694, 0.74, 0.788, 0.833, 0.955, 1.065,
    1.237, 1.62, 2.264, 2.79, 15.09, 23.55, 29.0,
)
SHARES = (
    0.0, 0.039, 0.077, 0.126, 0.165, 0.302, 0.446, 0.609, 0.642, 0.686, 0.73, 0.756, 0.798, 0.821, 0.85, 0.873, 0.89, 0.919, 0.931,
    0.936, 0.939, 0.9405, 0.943, 0.945, 0.947, 0.9495,
)
# fmt: on
"""Cumulative distribution of published durations, from the same figure: SHARES[i] of the executions take at most SECONDS[i]."""


def workload(prompts, responses, epochs, spread, seed):
    """Epochs of (prompt, whether correct, seconds): a typical published duration for each prompt times a log-normal factor.

    From 20% to 100% of a prompt's responses are correct, which is our choice. Of the wrong ones, as many never end as published.
    """
    rng = random.Random(seed)
    typical = [float(np.interp((i + 0.5) / prompts * SHARES[-1], SHARES, SECONDS)) for i in range(prompts)]
    correct = [0.2 + 0.8 * (i + 0.5) / prompts for i in range(prompts)]
    rng.shuffle(typical)
    for _ in range(epochs):
        answers = [(prompt, rng.random() < correct[prompt]) for prompt in range(prompts) for _ in range(responses)]
        wrong = [index for index, (_, right) in enumerate(answers) if not right]
        hanging = set(rng.sample(wrong, round(HANGING * len(answers))))
        for index, (prompt, right) in enumerate(answers):
            seconds = min(typical[prompt] * rng.lognormvariate(0, spread), SECONDS[-1])
            yield prompt, right, 1e9 if index in hanging else seconds


def test_the_workload_is_as_published():
    drawn = list(workload(100, 64, 4, 0.3, seed=0))
    ending = sorted(seconds for _, _, seconds in drawn if seconds < 1e9)
    assert 1 - len(ending) / len(drawn) == pytest.approx(HANGING, abs=1e-3)
    assert not any(right and seconds == 1e9 for _, right, seconds in drawn)
    assert ending[len(ending) // 2] == pytest.approx(0.31, abs=0.03)
    assert sum(right for _, right, _ in drawn) / len(drawn) == pytest.approx(0.6, abs=0.02)


def replay(responses=8, epochs=1, spread=0.3, probes=0.0, seeds=3, prompts=120, caution=2.0, **flags):
    """Return how many times less than with a fixed limit executions take in all, and the share of correct answers stopped."""
    fixed = ours = killed = correct = 0.0
    for seed in range(seeds):
        policy = AdaptiveTimeout(RewardTimeoutFlags(probe_share=probes, maximum=30.0, **flags), caution=caution)
        groups = defaultdict(list)
        drawn = workload(prompts, responses, epochs, spread, seed)
        for number, (prompt, right, seconds) in enumerate(drawn):
            groups[number // (prompts * responses), prompt].append((seconds, right))
        for (_, prompt), group in groups.items():
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
    print(
        f"{responses} responses, {epochs} epochs, spread {spread}, {flags}: {fixed / ours:.1f}x, killed {killed / correct:.2%}"
    )
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
