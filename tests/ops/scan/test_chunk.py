"""The chunk scan in plain torch against the loop in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_accel.ops import discounted_returns, gae
from rl_accel.ops.scan.chunk import reverse_scan


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 6),
    tokens=st.integers(1, 300),
    chunk_size=st.one_of(st.none(), st.integers(1, 400)),
    kind=st.sampled_from(["none", "bits", "fractions"]),
    rates=st.sampled_from([(1.0, 1.0), (0.99, 0.95), (0.5, 1.0), (0.0, 0.5), (1.0, 0.0)]),
    seed=st.integers(0, 2**30),
)
def test_agrees_with_the_loop(rows, tokens, chunk_size, kind, rates, seed):
    random = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(rows, tokens, generator=random, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(rows, tokens, generator=random, dtype=torch.float64)
    mask = {"none": None, "bits": mask < 0.7, "fractions": mask}[kind]
    ours = gae(rewards, values, mask, *rates, backend="chunk", chunk_size=chunk_size)
    torch.testing.assert_close(ours, gae(rewards, values, mask, *rates, backend="naive"), rtol=1e-11, atol=1e-11)
    ours = discounted_returns(rewards, mask, rates[0], backend="chunk", chunk_size=chunk_size)
    loop = discounted_returns(rewards, mask, rates[0], backend="naive")
    torch.testing.assert_close(ours, loop, rtol=1e-11, atol=1e-11)


def test_float32_stays_within_rounding_of_float64(case):
    for seed in range(80):
        c = case(seed)
        exact = gae(c.rewards.double(), c.values.double(), c.mask, c.gamma, c.lam, backend="naive")
        for a, b in zip(gae(c.rewards, c.values, c.mask, c.gamma, c.lam, backend="chunk"), exact, strict=True):
            scale = float(b.abs().max()) + 1e-30
            assert float((a.double() - b).abs().max()) <= 1e-5 * scale, seed


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_not_finite_spreads_as_in_the_loop(value, packed):
    torch.manual_seed(1)
    for place, into_values, fractional in ((150, 0, 0), (150, 1, 0), (190, 0, 1), (0, 1, 0), (199, 0, 0)):
        rewards, values, mask = torch.randn(3, 200), torch.randn(3, 200), torch.rand(3, 200)
        (values if into_values else rewards)[1, place] = value
        mask = mask if fractional else (mask < 0.7).long()
        bounds = None
        if packed:
            rewards, values, mask = rewards.flatten(), values.flatten(), mask.flatten()
            bounds = torch.tensor([0, 200, 400, 600])
        ours = gae(rewards, values, mask, 0.99, 0.95, cu_seqlens=bounds, backend="chunk", chunk_size=32)
        loop = gae(rewards, values, mask, 0.99, 0.95, cu_seqlens=bounds, backend="naive")
        torch.testing.assert_close(ours, loop, equal_nan=True)


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
