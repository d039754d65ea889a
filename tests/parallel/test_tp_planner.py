"""Tests the decisions of the TP planner: the published rule and numbers, the later check, and noise."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_accel.features import TpReplanFlags
from rl_accel.parallel import tp_planner
from rl_accel.parallel.model_memory import TpBounds
from rl_accel.parallel.tp_planner import CALM_STEPS, CHECK_STEPS, RETRY_STEPS, STATE_FILE, Observation

PUBLISHED = {
    # RollPacker (NSDI'26), Qwen3-8B, 32k tokens, 8 GPUs: preemptions and rollout seconds of a step at each size
    "short": {1: (5199, 1029), 2: (4102, 768)},
    "long": {1: (2900, 1172), 2: (2601, 1284)},
}
RISES_AT = tp_planner.REFERENCE_STEPS[1]
RAISED_AT = RISES_AT + tp_planner.CONFIRM_STEPS - 1
BACK_AFTER = CHECK_STEPS[0] + 1
"""Steps from asking for a change until it is rolled back: the first step at the new size is not counted."""
RISE = {number: 12 if number < 6 else 60 for number in range(8)}


def planner(sizes=8, max_changes=6, **bounds):
    return tp_planner.TpPlanner(TpBounds(TpReplanFlags(**bounds), sizes, 8), max_changes)


def step(preemptions=0, tp=1, seconds=100.0, kind="all", tokens=1_000_000):
    return Observation(kind=kind, tp=tp, preemptions=preemptions, rollout_seconds=float(seconds), tokens=tokens)


class Run:
    """Steps whose advice is carried out at once. ``world(number, tp)`` gives the arguments of :func:`step`."""

    def __init__(self, world, tp=1, **arguments):
        self.world, self.tp, self.planner, self.decisions = world, tp, planner(**arguments), []

    def go(self, steps):
        for _ in range(steps):
            decision = self.planner.step(step(tp=self.tp, **self.world(len(self.decisions), self.tp)))
            self.decisions.append(decision)
            self.tp = self.tp if decision is None else decision.tp
        return self

    @property
    def changes(self):
        return [(i, d.change, d.tp) for i, d in enumerate(self.decisions) if d is not None]


def pressure(before=1000, after=1500, seconds=None):
    """Preemptions rise once and stay; rollout takes ``seconds[tp]``."""
    return lambda i, tp: {"preemptions": before if i < RISES_AT else after, "seconds": (seconds or {}).get(tp, 100)}


def test_a_rise_that_is_confirmed_or_slow_doubles_tp():
    run = Run(pressure(1000, 1300)).go(RAISED_AT + 1)
    assert run.changes == [(RAISED_AT, "raise", 2)]
    assert "1.300 times" in run.decisions[-1].reason
    assert "1300 over 1000" in run.decisions[-1].reason
    slow = Run(lambda i, tp: {"preemptions": round(1000 * 1.02**i)}).go(60)
    assert slow.changes[0][1:] == ("raise", 2)


RAISED = [(RAISED_AT, "raise", 2)]
CHANGES = {
    "one high step": (lambda i, tp: {"preemptions": 5000 if i == 12 else 1000}, {}, 60, []),
    "a handful": (lambda i, tp: {"preemptions": 1 if i < 12 else 8}, {}, 60, []),
    "less than the threshold": (pressure(1000, 1040), {}, 60, []),
    "noise of independent events": (pressure(100, 118), {}, 60, []),
    "unknown": (lambda i, tp: {"preemptions": None}, {}, 60, []),
    "too few steps": (
        lambda i, tp: {"preemptions": 1000 * 2**i if i < tp_planner.REFERENCE_STEPS[0] else 0 if i % 4 else 1},
        *({}, 60, []),
    ),
    "unknown ends a calm": (lambda i, tp: {"preemptions": None if i % CALM_STEPS == 3 else 0}, *({"tp": 4}, 60, [])),
    "long rounds need the memory": (
        lambda i, tp: {"kind": "long", "preemptions": 100} if i % 6 == 0 else {"kind": "short"},
        *({"tp": 2}, 60, []),
    ),
    "no larger size": (pressure(1000, 2000), {"sizes": 4, "tp": 4}, RAISED_AT + 1, []),
    "at the largest": (pressure(1000, 2000), {"tp": 2, "max_tp": 2}, RAISED_AT + 1, []),
    "no change left to go back": (pressure(1000, 2000), {"max_changes": 1}, RAISED_AT + 1, []),
    "at the least": (pressure(0, 0), {}, RAISED_AT + 1, []),
    "an odd size": (pressure(0, 0), {"tp": 3, "sizes": 6}, RAISED_AT + 1, []),
    "a raise that helps is not lowered at once": (
        lambda i, tp: pressure()(i, tp) | ({"preemptions": 0, "seconds": 90} if tp == 2 else {}),
        *({}, RAISED_AT + RETRY_STEPS, RAISED),
    ),
    "a slow first step is not counted": (
        lambda i, tp: {**pressure()(i, tp), "seconds": 400 if i == RAISED_AT + 1 else 100},
        *({}, 40, RAISED),
    ),
    "more tokens take longer": (
        lambda i, tp: {**pressure()(i, tp), "seconds": 100 * tp, "tokens": 10**6 * tp},
        *({}, 40, RAISED),
    ),
    "rolling back needs no preemptions": (
        lambda i, tp: pressure(seconds={2: 200})(i, tp) | ({"preemptions": None} if tp == 2 else {}),
        *({}, 30, [*RAISED, (RAISED_AT + BACK_AFTER, "roll back", 1)]),
    ),
}
"""Worlds, arguments of the run, number of steps and the changes that are made in them, by what they show."""


@pytest.mark.parametrize(("world", "arguments", "steps", "changes"), CHANGES.values(), ids=CHANGES)
def test_changes_are_made_with_a_reason_and_where_they_are_possible(world, arguments, steps, changes):
    assert Run(world, **arguments).go(steps).changes == changes


def test_steps_without_a_preemption_halve_tp_down_to_the_least_and_one_at_an_impossible_size_is_an_error():
    run = Run(lambda i, tp: {"preemptions": 0 if i > 2 else 50}, tp=8, min_tp=2).go(40)
    assert run.changes[0] == (2 + CALM_STEPS, "lower", 4)
    assert [tp for _, _, tp in run.changes] == [4, 2]
    with pytest.raises(ValueError, match="found 3: does not divide 8 GPUs"):
        planner().step(step(tp=3))


def test_a_change_that_made_rollout_slower_is_rolled_back_and_tried_again_ever_more_rarely():
    run = Run(pressure(0, 0, {1: 110}), tp=2).go(150)
    assert [change for _, *change in run.changes] == [["lower", 1], ["roll back", 2]] * 3
    at = [i for i, *_ in run.changes]
    assert (at[1] - at[0], at[2] - at[1], at[4] - at[3]) == (BACK_AFTER, RETRY_STEPS + 1, 2 * RETRY_STEPS + 1)
    assert (run.tp, run.planner.changes) == (2, 6)
    assert "expected: 9.1% fewer" in run.decisions[at[1]].reason


def test_a_kind_that_stops_coming_holds_the_check_up_for_a_while_only():
    def world(i, tp):
        kind = "long" if i % 2 and tp == 1 else "short"
        return {"kind": kind, "preemptions": 1000 if i < 30 else 2000, "seconds": 100 * tp}

    (raised, *_), (back, *change) = Run(world).go(60).changes[:2]
    assert change == ["roll back", 1]
    assert back - raised == CHECK_STEPS[1] + 1


def scattered(seeds, sigma, steps):
    """Factors of each step, which scatter by a share of ``sigma``, for each seed."""
    return [np.random.default_rng(seed).lognormal(0, sigma, steps) for seed in range(seeds)]


@pytest.mark.parametrize(("slower", "share"), [(1.0, (0.0, 0.1)), (1.15, (0.9, 1.0)), (0.9, (0.0, 0.02))])
def test_the_check_under_noise(slower, share):
    """Rollout seconds scatter by 5%: a change that costs 15% goes back, and one that costs nothing rarely does."""
    back = 0
    for scatter in scattered(100, 0.05, 40):
        seconds = {1: scatter * 100, 2: scatter * 100 * slower}
        run = Run(lambda i, tp, seconds=seconds: {**pressure()(i, tp), "seconds": seconds[tp][i]}).go(34)
        assert run.changes[0] == (RAISED_AT, "raise", 2)
        back += any(change == "roll back" for _, change, _ in run.changes)
    assert share[0] <= back / 100 <= share[1]


def test_noise_alone_changes_nothing_and_a_real_rise_is_found_in_it():
    """Preemptions are constant but for their scatter: a change is an accident, less often than once in 1500 steps."""
    for noise in (0.05, 0.2):
        raised = 0
        for counts in scattered(30, noise, 500):
            steps = [{"kind": "short" if i % 5 else "long", "preemptions": round(5000 * counts[i])} for i in range(500)]
            run = Run(lambda i, tp, steps=steps: steps[i]).go(500)
            raised += sum(change == "raise" for _, change, _ in run.changes)
        assert raised <= 30 * 500 / 1500, noise
    detected = 0
    for counts in scattered(40, 0.1, 40):
        run = Run(lambda i, tp, counts=counts: {"preemptions": round(5000 * counts[i] * (1 if i < 30 else 1.5))}).go(40)
        detected += bool(run.changes) and run.changes[0][0] >= 30
    assert detected >= 34


def test_advice_that_is_not_taken_is_repeated_more_and_more_rarely():
    advisor = planner()
    asked = [i for i in range(130) if advisor.step(step(tp=2)) is not None]
    assert asked == [3, 4 + RETRY_STEPS, 5 + 3 * RETRY_STEPS]
    assert advisor.changes == 0


def test_a_size_that_was_not_asked_for_starts_anew():
    run = Run(pressure(seconds={4: 500})).go(RISES_AT)
    run.tp = 4
    assert run.go(8).changes == [], "the rise was at another size, and so was the speed"
    assert run.planner.changes == 0


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


def play(folder, steps, tp=1, sizes=8):
    """Show a launch the ``steps``, preemptions by number; return the last change and the last numbers."""
    run = tp_planner.PlannedRun(TpBounds(TpReplanFlags(), sizes, sizes), 6, str(folder))
    for number, preemptions in steps.items():
        change, numbers = run.take_in(number, {}, tp=tp, preemptions=preemptions, seconds=10.0, tokens=800)
    return change, numbers


def test_a_launch_goes_on_with_what_earlier_ones_saw_before_its_first_step(tmp_path):
    change, _ = play(tmp_path, RISE)
    assert change.tp == 2
    assert play(tmp_path, {8: 0}, tp=2)[1]["changes"] == 1, "what was asked for is what it runs at"
    assert play(tmp_path, {7: 60})[0].tp == 2, "a step that is made again is seen once"
    assert play(tmp_path, {8: 0}, tp=1, sizes=1)[1]["changes"] == 0, "sizes may have become impossible"


def test_a_new_run_in_the_folder_of_an_old_one_and_a_damaged_file_begin_anew(tmp_path, caplog):
    play(tmp_path, RISE)
    assert play(tmp_path, {0: 0}, tp=2)[1]["changes"] == 0
    assert [step["step"] for step in json.loads((tmp_path / STATE_FILE).read_text())["steps"]] == [0]
    for text in ("{", "[]", '{"steps": [{"step": 1, "kind": "all"}]}', '{"steps": [1]}'):
        (tmp_path / STATE_FILE).write_text(text)
        assert play(tmp_path, {8: 0}, tp=2)[1]["changes"] == 0
    assert caplog.text.count("begins anew") == 4


def test_tail_batching_tells_the_kind_of_a_round_and_its_tokens(tmp_path):
    run = tp_planner.PlannedRun(TpBounds(TpReplanFlags(), 8, 8), 6, str(tmp_path))
    tail = "rl_accel/tail_batching/"
    short = {tail + "short_round": 1.0, tail + "long_round": 0.0, tail + "tokens_generated": 912.0}
    for number, metrics in enumerate([{}, short, {tail + "short_round": 0.0, tail + "long_round": 1.0}]):
        run.take_in(number, metrics, tp=1, preemptions=number, seconds=10.0, tokens=800)
    kept = json.loads((tmp_path / STATE_FILE).read_text())["steps"]
    kinds = [(step["kind"], step["tokens"], step["preemptions"]) for step in kept]
    assert kinds == [("all", 800, 0), ("short", 912, 1), ("long", 800, 2)]


any_step = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["short", "long", "all"]),
        "preemptions": st.one_of(st.just(0), st.none(), st.integers(0, 30), st.integers(0, 20_000)),
        "seconds": st.sampled_from([1.0, 10.0, 30.0, 1e6]),
        "tokens": st.sampled_from([1, 1000, 1200, 10**6]),
    }
)
any_move = st.tuples(st.sampled_from(["as advised"] * 8 + ["as before"] * 2 + ["any"]), st.integers(0, 100))
"""How the size of the next step comes about."""


@settings(deadline=None)
@given(
    world=st.sampled_from([1, 2, 4, 6, 8, 12, 16]),
    min_tp=st.sampled_from([1, 2]),
    max_changes=st.integers(0, 8),
    steps=st.lists(st.tuples(any_move, any_step), max_size=80),
)
def test_whatever_it_sees(world, min_tp, max_changes, steps):
    """Decisions stay within the bounds, follow from what is known, are explained in one line, and are as few as was said."""
    one = planner(sizes=world, min_tp=min(min_tp, world), max_changes=max_changes)
    sizes = one.bounds.sizes
    tp = advised = sizes[0]
    for (moved, pick), values in steps:
        tp = {"as advised": advised, "as before": tp, "any": sizes[pick % len(sizes)]}[moved]
        decision = one.step(step(tp=tp, **values))
        advised = tp
        assert one.changes <= max_changes
        if decision is None:
            continue
        possible = {"raise": [2 * tp], "lower": [tp / 2], "roll back": sizes}
        assert decision.tp in sizes
        assert decision.tp in possible[decision.change]
        assert decision.tp != tp
        assert f"TP {tp}" in decision.reason
        assert "\n" not in decision.reason
        if values["preemptions"] is None:
            assert decision.change == "roll back"
        if values["preemptions"] != 0:
            assert decision.change != "lower"
        advised = decision.tp
