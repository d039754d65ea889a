"""What the planner decides: the published rule and numbers, the check afterwards, and what it does about noise."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_accel.features import TpReplanFlags
from rl_accel.parallel.model_memory import TpBounds
from rl_accel.parallel.tp_planner import (
    CALM_STEPS,
    CHECK_STEPS,
    CONFIRM_STEPS,
    REFERENCE_STEPS,
    RETRY_STEPS,
    Observation,
    TpPlanner,
)

PUBLISHED = {
    # RollPacker (NSDI'26), Qwen3-8B, 32k tokens, 8 GPUs: preemptions and rollout seconds of a step at each size
    "short": {1: (5199, 1029), 2: (4102, 768)},
    "long": {1: (2900, 1172), 2: (2601, 1284)},
}
RISES_AT = REFERENCE_STEPS[1]
RAISED_AT = RISES_AT + CONFIRM_STEPS - 1
BACK_AFTER = CHECK_STEPS[0] + 1
"""Steps from asking for a change until it is rolled back: the first step at the new size is not counted."""


def planner(sizes=8, max_changes=6, **bounds):
    return TpPlanner(TpBounds(TpReplanFlags(**bounds), sizes, 8), max_changes)


def step(preemptions=0, tp=1, seconds=100.0, kind="all", tokens=1_000_000):
    return Observation(kind, tp=tp, preemptions=preemptions, rollout_seconds=float(seconds), tokens=tokens)


class Run:
    """Steps whose advice is carried out at once. ``world(number, tp)`` gives the arguments of :func:`step`."""

    def __init__(self, world, tp=1, **arguments):
        self.world, self.tp, self.planner, self.decisions = world, tp, planner(**arguments), []

    def go(self, steps):
        for _ in range(steps):
            decision = self.planner.step(step(tp=self.tp, **self.world(len(self.decisions), self.tp)))
            self.decisions.append(decision)
            self.tp = decision.tp
        return self

    @property
    def changes(self):
        return [(i, d.change, d.tp) for i, d in enumerate(self.decisions) if d.change != "keep"]

    @property
    def last(self):
        return self.decisions[-1].reason


def pressure(before=1000, after=1500, seconds=None):
    """Preemptions rise once and stay; rollout takes ``seconds[tp]``."""
    return lambda i, tp: {
        "preemptions": before if i < RISES_AT else after,
        "seconds": (seconds or {}).get(tp, 100),
    }


# The rule


def test_a_rise_that_is_confirmed_doubles_tp():
    run = Run(pressure(1000, 1300)).go(RAISED_AT + 1)
    assert run.changes == [(RAISED_AT, "raise", 2)]
    assert "1.300 times" in run.last
    assert "1300 over 1000" in run.last


def test_a_slow_rise_is_seen_too():
    run = Run(lambda i, tp: {"preemptions": round(1000 * 1.02**i)}).go(60)
    assert run.changes[0][1:] == ("raise", 2)


@pytest.mark.parametrize(
    ("world", "why"),
    [
        (lambda i, tp: {"preemptions": 5000 if i == 12 else 1000}, "one high step"),
        (lambda i, tp: {"preemptions": 1 if i < 12 else 8}, "a handful"),
        (pressure(1000, 1040), "less than the threshold"),
        (pressure(100, 118), "noise of independent events"),
        (lambda i, tp: {"preemptions": None}, "unknown"),
        (lambda i, tp: {"preemptions": 1000 * 2**i if i < REFERENCE_STEPS[0] else 0 if i % 4 else 1}, "too few steps"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_no_rise(world, why):
    assert Run(world, min_tp=1).go(40).changes == []


def test_steps_without_a_preemption_halve_tp_down_to_the_least():
    run = Run(lambda i, tp: {"preemptions": 0 if i > 2 else 50}, tp=8, min_tp=2).go(40)
    assert run.changes[0] == (2 + CALM_STEPS, "lower", 4)
    assert [tp for _, _, tp in run.changes] == [4, 2]
    assert "below min_tp = 2" in run.last


def test_unknown_preemptions_end_a_calm_row():
    assert Run(lambda i, tp: {"preemptions": None if i % CALM_STEPS == 3 else 0}, tp=4).go(20).changes == []


def test_a_round_kind_that_needs_the_memory_keeps_it():
    def world(i, tp):
        return {"kind": "long", "preemptions": 100} if i % 6 == 0 else {"kind": "short"}

    assert Run(world, tp=2).go(60).changes == []


@pytest.mark.parametrize(
    ("world", "arguments", "reason"),
    [
        (pressure(1000, 2000), {"sizes": 4, "tp": 4}, "TP 8 is not possible: there are 4 GPUs"),
        (pressure(1000, 2000), {"tp": 2, "max_tp": 2}, "TP 4 is not possible: is above max_tp = 2"),
        (pressure(0, 0), {}, "TP 1 cannot be halved"),
        (pressure(0, 0), {"tp": 3, "sizes": 6}, "TP 3 cannot be halved"),
        (pressure(1000, 2000), {"max_changes": 1}, "0 of at most 1 changes are made, and one is kept"),
    ],
)
def test_what_is_not_possible_is_said(world, arguments, reason):
    run = Run(world, **arguments).go(RAISED_AT + 1)
    assert run.changes == []
    assert reason in run.last


def test_a_step_at_an_impossible_size_is_an_error():
    with pytest.raises(ValueError, match="found 3: does not divide 8 GPUs"):
        planner().step(step(tp=3))


# The check afterwards


def test_a_change_that_made_rollout_slower_is_rolled_back_and_tried_again_ever_more_rarely():
    run = Run(pressure(0, 0, {1: 110}), tp=2).go(150)
    assert [change for _, *change in run.changes] == [["lower", 1], ["roll back", 2]] * 3
    at = [i for i, *_ in run.changes]
    assert at[1] - at[0] == BACK_AFTER
    assert (at[2] - at[1], at[4] - at[3]) == (RETRY_STEPS + 1, 2 * RETRY_STEPS + 1)
    assert run.tp == 2
    assert run.planner.changes == 6
    assert "6 of at most 6 changes" in run.last
    assert "9.1% fewer" in run.decisions[at[1]].expected


def test_a_raise_that_helps_stands_and_is_not_lowered_at_once():
    run = Run(lambda i, tp: {**pressure()(i, tp), **({"preemptions": 0, "seconds": 90} if tp == 2 else {})})
    run.go(RAISED_AT + RETRY_STEPS)
    assert run.changes == [(RAISED_AT, "raise", 2)]
    assert any("stands" in decision.reason for decision in run.decisions)


def test_a_slow_first_step_at_a_new_size_is_not_counted():
    run = Run(lambda i, tp: {**pressure()(i, tp), "seconds": 400 if i == RAISED_AT + 1 else 100})
    assert run.go(40).changes == [(RAISED_AT, "raise", 2)]


def test_more_tokens_may_take_longer():
    world = pressure(seconds={2: 200})
    run = Run(lambda i, tp: {**world(i, tp), "tokens": 10**6 * tp})
    assert run.go(40).changes == [(RAISED_AT, "raise", 2)]


def test_rolling_back_needs_no_preemptions():
    world = pressure(seconds={2: 200})
    run = Run(lambda i, tp: world(i, tp) | ({"preemptions": None} if tp == 2 else {})).go(30)
    assert run.changes == [(RAISED_AT, "raise", 2), (RAISED_AT + BACK_AFTER, "roll back", 1)]


def test_a_kind_that_stops_coming_holds_the_check_up_for_a_while_only():
    def world(i, tp):
        kind = "long" if i % 2 and tp == 1 else "short"
        return {"kind": kind, "preemptions": 1000 if i < 30 else 2000, "seconds": 100 * tp}

    (raised, *_), (back, *change) = Run(world).go(60).changes[:2]
    assert change == ["roll back", 1]
    assert back - raised == CHECK_STEPS[1] + 1


@pytest.mark.parametrize(("slower", "share"), [(1.0, (0.0, 0.1)), (1.15, (0.9, 1.0)), (0.9, (0.0, 0.02))])
def test_the_check_under_noise(slower, share):
    """Rollout seconds scatter by 5%: a change that costs 15% goes back, and one that costs nothing rarely does."""
    back = 0
    for seed in range(100):
        scatter = np.random.default_rng(seed).lognormal(0, 0.05, 40)
        seconds = {1: scatter * 100, 2: scatter * 100 * slower}
        run = Run(lambda i, tp, seconds=seconds: {**pressure()(i, tp), "seconds": seconds[tp][i]}).go(34)
        assert run.changes[0] == (RAISED_AT, "raise", 2)
        back += any(change == "roll back" for _, change, _ in run.changes)
    assert share[0] <= back / 100 <= share[1]


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_noise_alone_changes_nothing(noise):
    """Preemptions are constant but for their scatter: a change is an accident, less often than once in 1500 steps."""
    raised = 0
    for seed in range(30):
        counts = np.random.default_rng(seed).lognormal(math.log(5000), noise, 500)
        run = Run(lambda i, tp, counts=counts: {"kind": "short" if i % 5 else "long", "preemptions": round(counts[i])})
        raised += sum(change == "raise" for _, change, _ in run.go(500).changes)
    assert raised <= 30 * 500 / 1500


def test_a_real_rise_is_found_in_the_noise():
    detected = 0
    for seed in range(40):
        counts = np.random.default_rng(seed).lognormal(math.log(5000), 0.1, 40)
        run = Run(lambda i, tp, counts=counts: {"preemptions": round(counts[i] * (1 if i < 30 else 1.5))}).go(40)
        detected += bool(run.changes) and run.changes[0][0] >= 30
    assert detected >= 34


# Advice that is not taken


def test_advice_that_is_not_taken_is_repeated_more_and_more_rarely():
    advisor = planner()
    asked = [i for i in range(130) if advisor.step(step(tp=2)).change == "lower"]
    assert asked == [3, 4 + RETRY_STEPS, 5 + 3 * RETRY_STEPS]
    assert advisor.changes == 0


def test_rolling_back_is_asked_for_again_until_it_is_done():
    run = Run(pressure(seconds={2: 120})).go(RAISED_AT + BACK_AFTER + 1)
    assert run.decisions[-1].change == "roll back"
    again = [run.planner.step(step(1500, tp=2, seconds=120)) for _ in range(RETRY_STEPS + 1)]
    assert [decision.change for decision in again] == ["keep"] * RETRY_STEPS + ["roll back"]


def test_a_size_that_was_not_asked_for_starts_anew():
    run = Run(pressure(seconds={4: 500})).go(RISES_AT)
    run.tp = 4
    assert run.go(8).changes == [], "the rise was at another size, and so was the speed"
    assert run.planner.changes == 0


# The published numbers


@pytest.mark.parametrize(
    ("kinds", "best"),
    [
        (["short"], 2),
        (["long"], 1),
        (["short"] * 4 + ["long"], 2),  # 4 x 1029 + 1172 = 5288 s at TP 1, 4 x 768 + 1284 = 4356 s at TP 2
        (["long"] * 9 + ["short"], 1),
    ],
    ids=["short", "long", "four short to a long", "nine long to a short"],
)
def test_published(kinds, best):
    """Preemptions grow with the responses to the published values, and stay. TP 2 is tried, and kept where it is faster."""

    def world(i, tp):
        preemptions, seconds = PUBLISHED[kinds[i % len(kinds)]][tp]
        grown = round(preemptions * min(1.0, 0.6 + 0.04 * i))
        return {"kind": kinds[i % len(kinds)], "preemptions": grown, "seconds": seconds, "tokens": 10_000_000}

    run = Run(world, sizes=2).go(80)
    assert [change for _, *change in run.changes] == [["raise", 2], ["roll back", 1]][: 3 - best]
    if len(kinds) == 5:
        (verdict,) = [decision.reason for decision in run.decisions if "stands" in decision.reason]
        assert f"{4356 / 5288:.3f} times" in verdict


# Saving


def test_a_run_restarted_at_the_new_size_goes_on_with_the_check():
    before = Run(pressure(seconds={2: 120})).go(RAISED_AT + 1)
    after = Run(lambda i, tp: {"preemptions": 750, "seconds": 120}, tp=2)
    after.planner.load_state_dict(json.loads(json.dumps(before.planner.state_dict())))
    assert after.go(BACK_AFTER).changes == [(BACK_AFTER - 1, "roll back", 1)]


def test_a_size_that_became_impossible_is_not_rolled_back_to():
    before = Run(pressure(seconds={2: 120})).go(RAISED_AT + 2)
    after = Run(lambda i, tp: {"preemptions": 750, "seconds": 200}, tp=2, min_tp=2)
    after.planner.load_state_dict(before.planner.state_dict())
    assert after.go(20).changes == []


@pytest.mark.parametrize(
    "damage",
    [
        {"version": 1},
        {"history": [{"kind": "all"}]},
        {"holds": [[1, 2]]},
        {"tp": None},
        {"asked": [2]},
        {"before": None},
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage):
    state = Run(pressure(seconds={2: 120})).go(RAISED_AT + 3).planner.state_dict()
    fresh = planner()
    untouched = fresh.state_dict()
    (key,) = damage
    for broken in ({**state, **damage}, {other: value for other, value in state.items() if other != key}, None, []):
        with pytest.raises(ValueError, match="state of the TP planner"):
            fresh.load_state_dict(broken)
        assert fresh.state_dict() == untouched
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state


@pytest.mark.parametrize(
    "arguments",
    [
        {"preemptions": -1},
        {"kind": "final"},
        {"tokens": 0},
        {"seconds": 0.0},
        {"seconds": math.nan},
        {"seconds": math.inf},
    ],
)
def test_a_step_that_cannot_be_is_refused(arguments):
    with pytest.raises(ValueError, match="a step wants"):
        step(**arguments)


# Whatever it sees


@st.composite
def any_step(draw):
    """A step but for its size, and how the size comes about: as advised, as before, or any."""
    moved = draw(st.sampled_from(["as advised"] * 8 + ["as before"] * 2 + ["any"]))
    preemptions = draw(st.one_of(st.just(0), st.none(), st.integers(0, 30), st.integers(0, 20_000)))
    seconds, tokens = draw(st.sampled_from([1.0, 10.0, 30.0, 1e6])), draw(st.sampled_from([1, 1000, 1200, 10**6]))
    kind = draw(st.sampled_from(["short", "long", "all"]))
    return (
        moved,
        draw(st.integers(0, 100)),
        {
            "kind": kind,
            "preemptions": preemptions,
            "seconds": seconds,
            "tokens": tokens,
        },
    )


@settings(deadline=None)
@given(
    world=st.sampled_from([1, 2, 4, 6, 8, 12, 16]),
    min_tp=st.sampled_from([1, 2]),
    max_changes=st.integers(0, 8),
    steps=st.lists(any_step(), max_size=80),
    seed=st.randoms(),
)
def test_whatever_it_sees(world, min_tp, max_changes, steps, seed):
    """Decisions stay within the bounds, follow from what is known, are explained in one line, are as few as was said, and do not
    depend on whether the run was saved and resumed in between."""
    arguments = {"sizes": world, "min_tp": min(min_tp, world), "max_changes": max_changes}
    one, resumed = planner(**arguments), planner(**arguments)
    sizes = one.bounds.sizes
    tp = advised = sizes[0]
    for moved, pick, values in steps:
        tp = {"as advised": advised, "as before": tp, "any": sizes[pick % len(sizes)]}[moved]
        decision = one.step(step(tp=tp, **values))
        assert resumed.step(step(tp=tp, **values)) == decision
        if seed.random() < 0.3:
            state = json.loads(json.dumps(resumed.state_dict(), allow_nan=False))
            resumed = planner(**arguments)
            resumed.load_state_dict(state)
        possible = {"keep": [tp], "raise": [2 * tp], "lower": [tp / 2], "roll back": sizes}
        assert decision.tp in sizes
        assert decision.tp in possible[decision.change]
        assert (decision.change == "keep") == (decision.tp == tp)
        assert f"TP {tp}" in decision.reason
        assert "\n" not in str(decision)
        if values["preemptions"] is None:
            assert decision.change in ("keep", "roll back")
        if values["preemptions"] != 0:
            assert decision.change != "lower"
        assert one.changes <= max_changes
        advised = decision.tp
