"""Tests the decisions of the TP planner: the published rule, noise, and sizes between which it would swing."""

import numpy as np
import pytest

from rl_accel.parallel.tp_planner import CALM_STEPS, EARLIER_STEPS, LATEST_STEPS, TpPlanner, rises

RAISED_AT = EARLIER_STEPS + LATEST_STEPS
"""The first step in which a rise can be seen."""


def changes(counts, tp=1, sizes=(1, 2, 4, 8), kind=lambda step: "all"):
    """The changes that a planner asks for, as (step, size), in steps with so many preemptions; steps count from 1."""
    planner = TpPlanner(sizes, tp)
    asked = [(step, planner.step(kind(step), count)) for step, count in enumerate(counts, 1)]
    return [(step, change.tp) for step, change in asked if change is not None]


def test_a_rise_doubles_the_size_once_and_the_reason_has_the_numbers():
    planner = TpPlanner((1, 2), 1)
    asked = [planner.step("all", count) for count in [1000] * EARLIER_STEPS + [1300] * 10]
    (change,) = [change for change in asked if change is not None]
    assert asked.index(change) == RAISED_AT - 1
    assert (change.tp, change.min_tp) == (2, 2), "a resumed run must not go back"
    assert change.reason == "raise TP 1 to 2: 3 steps with 1300 preemptions or more, after 1000 on average"


@pytest.mark.parametrize(
    ("counts", "arguments", "wanted"),
    [
        ([1000] * 30 + [5000] + [1000] * 30, {}, []),
        ([1] * 30 + [8] * 30, {}, []),
        ([1000] * 30 + [1040] * 30, {}, []),
        ([None] * 60, {}, []),
        ([round(1000 * 1.02**step) for step in range(30)], {}, [(RAISED_AT, 2)]),
        ([1000] * EARLIER_STEPS + [1500] * 9, {"sizes": (1,)}, []),
        ([1000] * 5 + [None] + [1000] * 7 + [1500] * 9, {}, [(RAISED_AT + 1, 2)]),
        ([0] * 40, {"tp": 8}, [(CALM_STEPS, 4)]),
        ([0, 0, 0, None] * 10, {"tp": 4}, []),
        ([0] * 40, {"tp": 1}, []),
        ([0] * 40, {"tp": 3, "sizes": (1, 3)}, []),
        ([0] * 40, {"tp": 2, "sizes": (2, 4)}, []),
    ],
    ids=[
        *("one high step", "a handful", "less than the threshold", "unknown", "a slow rise", "no larger size"),
        *("an unknown step is left out", "calm", "an unknown step ends a calm", "at 1", "an odd size", "at the least"),
    ],
)
def test_when_the_size_changes(counts, arguments, wanted):
    assert changes(counts, **arguments) == wanted


def test_rounds_are_compared_with_their_own_kind_and_long_ones_that_preempt_keep_the_memory():
    def kind(step):
        return "long" if step % 6 == 1 else "short"

    def of_kinds(short, long, steps=60):
        return [long if kind(step) == "long" else short for step in range(1, steps + 1)]

    assert changes(of_kinds(1000, 3000), kind=kind) == []
    assert changes(of_kinds(0, 100), tp=2, kind=kind) == [], "short rounds alone are calm"
    grown = [*of_kinds(1000, 3000), *of_kinds(1500, 3000)]
    assert changes(grown, kind=kind) == [(64, 2)]


@pytest.mark.parametrize(("noise", "most"), [(0.05, 30), (0.2, 30)])
def test_scatter_alone_seldom_looks_like_a_rise(noise, most):
    """Of 30 x 500 steps, about one in 455 windows rises by chance; windows overlap."""
    found = 0
    for seed in range(30):
        counts = np.random.default_rng(seed).lognormal(np.log(5000), noise, 500).round().tolist()
        windows = [counts[end - RAISED_AT : end] for end in range(RAISED_AT, 501)]
        found += sum(map(rises, windows))
    assert 0 < found <= most * 500 / 200


def test_a_real_rise_is_found_within_the_scatter():
    found = 0
    for seed in range(40):
        scatter = np.random.default_rng(seed).lognormal(0, 0.1, 40)
        counts = [round(5000 * factor * (1 if step < 30 else 1.5)) for step, factor in enumerate(scatter)]
        found += any(step > 30 for step, _ in changes(counts))
    assert found >= 36
