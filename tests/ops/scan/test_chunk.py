"""The chunk scan in plain torch against the loop in float64."""

import torch

from rl_accel.ops import gae
from rl_accel.ops.scan.chunk import reverse_scan


def test_float32_stays_within_rounding_of_float64(case):
    for seed in range(80):
        c = case(seed)
        exact = gae(c.rewards.double(), c.values.double(), c.mask, c.gamma, c.lam, backend="naive")
        for a, b in zip(gae(c.rewards, c.values, c.mask, c.gamma, c.lam, backend="chunk"), exact, strict=True):
            scale = float(b.abs().max()) + 1e-30
            assert float((a.double() - b).abs().max()) <= 1e-5 * scale, seed


def test_reverse_scan_is_a_linear_recurrence_backwards():
    coefficients = torch.tensor([[0.5, 2.0, 0.0, 3.0]])
    terms = torch.tensor([[1.0, 1.0, 1.0, 1.0]])
    # 1; 1 + 0 * 1; 1 + 2 * 1; 1 + 0.5 * 3
    assert reverse_scan(coefficients, terms, 2).tolist() == [[2.5, 3.0, 1.0, 1.0]]


def test_memory_stays_linear_in_the_tokens():
    """A chunk matrix per token, or one of T x T, would be over 100 times the input here."""
    rewards = torch.randn(1, 1 << 16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        gae(rewards, rewards, (rewards > 0).long(), 0.99, 0.95, backend="chunk")
    level = highest = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            level += event.nbytes()
            highest = max(highest, level)
    assert 0 < highest < 30 * rewards.nbytes
