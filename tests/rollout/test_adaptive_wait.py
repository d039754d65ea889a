"""Tests the waiting policy with a simulated clock: cost and delay of polling."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_accel.rollout.adaptive_wait import AdaptiveWait

STOCK = 2.0


def test_cheap_polls_come_at_the_delay_and_dear_ones_at_the_share_or_at_stocks_pause():
    for cost, wait in ((0.0001, 0.02), (0.001, 0.02), (0.003, 0.003 * 19), (0.2, STOCK)):
        policy = AdaptiveWait()
        assert [policy.next_wait(cost, STOCK) for _ in range(5)][-1] == pytest.approx(wait)
    assert AdaptiveWait().next_wait(0.0001, longest=0.005) == 0.005


def test_growing_cost_is_followed_but_one_hiccup_does_not_slow_down_the_polls_after_it():
    policy = AdaptiveWait()
    for _ in range(10):
        policy.next_wait(0.001, STOCK)
    assert [policy.next_wait(cost, STOCK) for cost in (3.0, 0.001)] == [0.02, 0.02]
    assert [policy.next_wait(0.05, STOCK) for _ in range(5)][-1] == pytest.approx(0.05 * 19)


@given(
    share=st.floats(0.01, 1.0),
    delay=st.floats(0.001, 1.0),
    cost=st.floats(0.0, 0.09),
    polls=st.integers(5, 60),
)
def test_polls_stay_within_their_share_unless_stocks_own_would_not(share, delay, cost, polls):
    policy = AdaptiveWait(share, delay)
    waits = [policy.next_wait(cost, longest=100.0) for _ in range(polls)][4:]
    assert cost * len(waits) <= share * sum(wait + cost for wait in waits) + 1e-9


@given(costs=st.lists(st.floats(-1, 5), min_size=1, max_size=30), longest=st.floats(0.0, 3.0))
def test_wait_is_always_usable(costs, longest):
    policy = AdaptiveWait()
    assert all(0 <= policy.next_wait(cost, longest) <= longest for cost in costs)
