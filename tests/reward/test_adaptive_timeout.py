"""Tests the timeout policy by examples and properties: it learns only from correct answers, and keeps its bounds."""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_accel.features import RewardTimeoutFlags
from rl_accel.reward.adaptive_timeout import AdaptiveTimeout

NO_PROBES = {"probe_share": 0.0, "min_correct": 3, "maximum": 30.0}
times = st.floats(0, 100, allow_nan=False)
records = st.lists(st.tuples(st.sampled_from("abc"), times, times, st.booleans()), max_size=30)


def made(caution=0.0, capacity=200_000, **flags):
    return AdaptiveTimeout(RewardTimeoutFlags(**{**NO_PROBES, **flags}), capacity, caution)


def taught(*seconds, key="a", **settings):
    policy = made(**settings)
    for each in seconds:
        policy.record(key, each, each, correct=True)
    return policy


def test_the_full_budget_until_enough_answers_were_correct_by_default_one():
    policy = taught(0.3, 0.3)
    assert (policy.limit("a").wall, policy.limit("a").reason) == (30.0, "learning")
    policy.record("a", 0.3, 0.3, correct=True)
    assert [policy.limit(key).reason for key in "ab"] == ["adaptive", "learning"]
    default = AdaptiveTimeout()
    with pytest.raises(ValueError, match="wall must be a finite number of at least 0, found nan"):
        default.record("a", math.nan, 0.0, correct=True)
    default.record("a", 0.3, 0.3, correct=True)
    assert (default.limit("a").wall, default.limit("a").reason) == (2.0, "adaptive")


@pytest.mark.parametrize(
    ("longest", "limit"),
    [(0.3, 2.0), (1.0, 2.0), (4.0, 6.5), (19.0, 29.0), (25.0, 30.0)],
    ids=["reference solutions of the paper", "minimum", "1.5 times and slack", "near the maximum", "maximum"],
)
def test_the_limit_follows_the_longest_correct_answer_within_its_bounds(longest, limit):
    assert taught(0.1, longest, 0.2).limit("a").wall == limit


@pytest.mark.parametrize(
    ("correct", "limit"),
    [(1, 12.5), (2, 8.5), (4, 6.5), (400, 4.52)],
    ids=["3 times as long", "twice", "1.5", "as it is"],
)
def test_the_limit_is_wider_while_few_answers_were_correct(correct, limit):
    assert taught(*[2.68] * correct, min_correct=1, caution=2.0).limit("a").wall == pytest.approx(limit, abs=0.1)
    assert taught(*[0.3] * correct, min_correct=1, caution=2.0).limit("a").wall == 2.0


@pytest.mark.parametrize(
    ("cpu", "limit"),
    [(16.0, (12.5, 24.5)), (0.1, (12.5, 12.5))],
    ids=["each has an anchor", "one may compute for as long as another has waited"],
)
def test_wall_and_processor_time(cpu, limit):
    policy = made(min_correct=1)
    policy.record("a", wall=8.0, cpu=cpu, correct=True)
    assert (policy.limit("a").wall, policy.limit("a").cpu) == limit


@pytest.mark.parametrize(("share", "probes"), [(0.05, 10), (0.3, 60), (0.67, 134), (1.0, 200)])
def test_a_share_of_limits_is_the_full_budget_so_that_a_slow_correct_answer_can_be_seen(share, probes):
    policy = taught(0.3, 0.3, 0.3, probe_share=share)
    reasons = []
    for _ in range(200):
        reasons.append(policy.limit("a").reason)
        policy.record("a", 0.2, 0.2, correct=False)
    assert reasons.count("probe") == probes
    policy.record("a", 10.0, 10.0, correct=True)
    assert policy.learned("a").wall == 15.5


@pytest.mark.parametrize("slower", [4.0, 8.0])
def test_limits_are_widened_on_a_slow_day_by_two_slow_probes_among_a_hundred(slower):
    """All answers are right; from the second epoch on a machine, or a judge, takes several times longer."""
    draw, policy = random.Random(0), AdaptiveTimeout()
    killed = []
    for epoch in range(4):
        killed.append(0)
        for key in map(str, range(500)):
            for limit in [policy.limit(key) for _ in range(8)]:
                seconds = 3 * (slower if epoch else 1) * draw.lognormvariate(0, 0.3)
                if seconds <= limit.wall:
                    policy.record(key, seconds, seconds, correct=True)
                else:
                    killed[-1] += 1
    assert policy.scale > policy.flags.scale
    assert killed[0] < 8
    assert killed[-1] < 8, killed


@pytest.mark.parametrize(("between", "widens"), [(99, True), (100, False)])
def test_two_slow_probes_count_only_if_they_are_among_a_hundred(between, widens):
    policy = taught(3.0, 3.0, 3.0, probe_share=1.0)
    answers = [
        policy.limit("a").reason and policy.record("a", seconds, 0.0, True)
        for seconds in (9.0, *[1.0] * (between - 1), 40.0)
    ]
    assert answers == [False] * between + [widens]
    assert policy.scale == (3.0 if widens else 1.5)


def test_limits_are_not_widened_by_hangs_or_by_answers_that_differ_as_before():
    draw, policy = random.Random(0), AdaptiveTimeout()
    for number in range(40_000):
        key, hangs, seconds = str(number // 8 % 500), draw.random() < 0.05, 3 * draw.lognormvariate(0, 0.3)
        limit = policy.limit(key)
        policy.record(key, min(limit.wall, 1e9 if hangs else seconds), 0.0, not hangs and seconds <= limit.wall)
    assert policy.scale == policy.flags.scale


def test_the_keys_not_used_for_longest_are_forgotten():
    policy = made(capacity=2, min_correct=1)
    for key in "ab":
        policy.record(key, 1.0, 1.0, correct=True)
    policy.limit("a")
    policy.record("c", 1.0, 1.0, correct=True)
    assert [policy.limit(key).reason for key in "abc"] == ["adaptive", "learning", "adaptive"]


def taught_by(history):
    policy = made()
    for key, wall, cpu, correct in history:
        policy.record(key, wall, cpu, correct)
    return policy


@given(records)
def test_a_limit_is_never_out_of_bounds_and_never_below_a_correct_answer(history):
    policy = taught_by(history)
    for key in "abc":
        longest = max((wall for of, wall, _, correct in history if of == key and correct), default=0.0)
        assert max(2.0, min(longest, 30.0)) <= policy.limit(key).wall <= 30.0


@given(records, records)
def test_merging_is_idempotent_and_in_any_order_the_same(ours, theirs):
    one, other = taught_by(ours), taught_by(theirs)
    one.merge(taught_by(theirs).anchors())
    other.merge(taught_by(ours).anchors())
    assert one.state_dict()["anchors"] == other.state_dict()["anchors"]
    before = one.state_dict()
    one.merge(taught_by(theirs).anchors())
    assert one.state_dict() == before


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"format": "x"}, "state must be of"),
        ([], "state must be of"),
        ({"anchors": {"a": [1.0]}}, "state is damaged: ValueError"),
        ({"anchors": {"a": [-1.0, 1.0, 1]}}, "anchor of 'a'"),
        ({"anchors": 3}, "state is damaged: AttributeError"),
    ],
)
def test_a_state_is_json_and_comes_back_and_a_foreign_or_damaged_one_is_refused(state, message):
    policy = made()
    policy.load_state_dict(json.loads(json.dumps(taught(1.0, 4.0, 2.0).state_dict())))
    if isinstance(state, dict) and "anchors" in state:
        state = {**policy.state_dict(), **state}
    with pytest.raises(ValueError, match=message):
        policy.load_state_dict(state)
    assert policy.limit("a").wall == 6.5
