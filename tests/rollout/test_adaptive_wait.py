"""Tests the waiting policy with a simulated clock: cost and delay of polling, and when it polls faster."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_accel.rollout.adaptive_wait import AdaptiveWait

STOCK = 2.0


class Clock:
    """Drives a policy: each poll takes ``cost`` seconds, then the policy's pause passes."""

    def __init__(self, policy, cost):
        self.policy, self.cost, self.now, self.polled = policy, cost, 0.0, 0.0

    def poll(self, outstanding=10, settled=0, longest=STOCK, cost=None):
        cost = self.cost if cost is None else cost
        self.now += cost
        self.polled += cost
        wait = self.policy.next_wait(self.now, cost, outstanding, settled, longest)
        self.now += wait
        return wait


def test_dearer_polls_keep_the_delay_while_savings_last_then_the_cost():
    clock = Clock(AdaptiveWait(), cost=0.003)
    waits = [clock.poll() for _ in range(1000)]
    assert waits[100] + clock.cost <= 0.02 + 1e-9
    assert waits[-1] + clock.cost == pytest.approx(0.003 / 0.05)
    clock.now += 10.0  # a training step earns the savings back
    assert [clock.poll() + clock.cost <= 0.02 + 1e-9 for _ in range(50)] == [True] * 50


def test_waits_longer_than_stock_only_where_stock_would_break_the_share():
    assert Clock(AdaptiveWait(), cost=0.0001).poll(longest=0.005) == 0.005
    clock = Clock(AdaptiveWait(), cost=0.2)
    assert [clock.poll() for _ in range(3)] == [STOCK, STOCK, pytest.approx(0.2 * 19)]
    clock.now = clock.polled = 0.0
    for _ in range(50):
        clock.poll()
    assert clock.polled / clock.now <= 0.05 + 1e-9


def test_growing_cost_is_followed_but_one_hiccup_does_not_slow_down_the_polls_after_it():
    clock = Clock(AdaptiveWait(), cost=0.001)
    for _ in range(10):
        clock.poll()
    assert clock.poll(cost=3.0) <= 0.02
    assert clock.poll() <= 0.02
    waits = [clock.poll(cost=0.05) for _ in range(5)]
    assert waits[-1] == pytest.approx(0.05 * 19)


def test_hurries_near_the_end_and_backs_off():
    clock = Clock(AdaptiveWait(), cost=0.0001)
    clock.poll(64, 0)
    assert clock.poll(60, 4) == pytest.approx(0.02 - 0.0001)  # far from the end: changes are no news
    assert clock.poll(8, 56) == pytest.approx(0.005)
    assert clock.poll(7, 57) == pytest.approx(0.005)
    assert [clock.poll(7, 57) for _ in range(3)] == pytest.approx([0.0099, 0.0199, 0.0199])
    assert clock.poll(6, 58) == pytest.approx(0.005)


@given(
    share=st.floats(0.01, 1.0),
    delay=st.floats(0.001, 1.0),
    cost=st.floats(0.0, 0.5),
    events=st.lists(st.tuples(st.floats(0, 30), st.integers(0, 20), st.integers(0, 20)), max_size=60),
)
def test_polling_is_bounded_over_any_stretch(share, delay, cost, events):
    """Gaps of any length between samples (training), any news: cost <= share * (time + 10) + one poll."""
    clock = Clock(AdaptiveWait(share, delay), cost)
    spent = [(0.0, 0.0)]
    for gap, outstanding, settled in events:
        clock.now += gap if gap > 10 else 0.0
        wait = clock.poll(outstanding, settled, longest=math.inf)
        assert 0 <= wait < math.inf
        spent.append((clock.now, clock.polled))
    for i, (begin, before) in enumerate(spent):
        for end, after in spent[i:]:
            assert after - before <= share * (end - begin + 10) + cost + 1e-6


@given(
    costs=st.lists(st.floats(0, 5), min_size=1, max_size=30),
    longest=st.floats(0.0, 3.0),
    counts=st.lists(st.integers(0, 100), min_size=1, max_size=30),
)
def test_wait_is_always_usable(costs, longest, counts):
    clock = Clock(AdaptiveWait(), 0.0)
    for cost, count in zip(costs, counts, strict=False):
        wait = clock.poll(count, 100 - count, longest=longest, cost=cost)
        assert 0 <= wait <= max(longest, 19 * max(costs) + 1e-9)


@pytest.mark.parametrize(("name", "beyond"), [("max_cpu_share", 1.5), ("max_delay_s", math.inf)])
def test_a_limit_out_of_range_is_refused(name, beyond):
    for value in (0, -1, beyond, math.nan):
        with pytest.raises(ValueError, match=name):
            AdaptiveWait(**{name: value})
