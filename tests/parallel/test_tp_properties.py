"""What holds of the planner whatever it sees: bounds, calm, words, the way back, and saving at any moment."""

import json
from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from rl_accel.parallel.tp_bounds import TpBounds
from rl_accel.parallel.tp_decisions import Observation
from rl_accel.parallel.tp_planner import TpPlanner
from rl_accel.parallel.tp_settings import TpSettings

KINDS = st.sampled_from(["short", "long", "all"])
MIXES = st.sampled_from([["all"], ["short"], ["short", "short", "short", "short", "long"], ["short", "long"]])
MANY = 10**6


@st.composite
def some_bounds(draw):
    world = draw(st.integers(1, 16))
    least = draw(st.sampled_from([1, 1, 2]))
    chosen = TpSettings(
        min_tp=min(least, world),
        max_tp=draw(st.sampled_from([None, None, 4, 8])),
        cooldown=draw(st.integers(0, 6)),
        calm_steps=draw(st.integers(1, 5)),
        confirm_steps=draw(st.integers(1, 3)),
        reference_steps=draw(st.integers(1, 12)),
        check_steps=draw(st.integers(2, 4)),
        check_limit=draw(st.integers(4, 10)),
        retry_steps=draw(st.integers(1, 10)),
        max_changes=draw(st.integers(0, 8)),
    )
    model = draw(st.sampled_from([None, {"num_attention_heads": 8, "num_key_value_heads": 2}]))
    sizes = [tp for tp in range(1, 17) if world % tp == 0 and (model is None or 8 % tp == 0)]
    if not any(chosen.min_tp <= tp <= (chosen.max_tp or 16) for tp in sizes):
        chosen = TpSettings()
    return TpBounds(chosen, world, model=model)


@st.composite
def a_step(draw):
    """A step but for its size, and how the size comes about: as advised, as before, or any."""
    moved = draw(st.sampled_from(["as advised"] * 8 + ["as before"] * 2 + ["any"]))
    preemptions = draw(st.one_of(st.just(0), st.none(), st.integers(0, 30), st.integers(0, 20_000)))
    seconds, tokens = draw(st.sampled_from([1.0, 10.0, 30.0, 1e6])), draw(st.sampled_from([1, 1000, 1200, MANY]))
    kv_use = draw(st.one_of(st.none(), st.floats(0, 1)))
    return moved, draw(st.integers(0, 100)), draw(KINDS), preemptions, seconds, tokens, kv_use


def play(planner, steps, tp, after_each=lambda planner: planner):
    """Feed the steps; yields each observation and decision."""
    advised = tp
    for moved, pick, kind, preemptions, seconds, tokens, kv_use in steps:
        sizes = planner.bounds.sizes
        tp = {"as advised": advised, "as before": tp, "any": sizes[pick % len(sizes)]}[moved]
        seen = Observation(kind, tp=tp, preemptions=preemptions, rollout_seconds=seconds, tokens=tokens, kv_use=kv_use)
        decision = planner.step(seen)
        yield seen, decision
        advised = decision.tp
        planner = after_each(planner)


@settings(deadline=None)
@given(bounds=some_bounds(), steps=st.lists(a_step(), max_size=60), start=st.integers(0, 100))
def test_every_decision_is_within_bounds_and_explains_itself(bounds, steps, start):
    sizes = bounds.sizes
    carried_out, last = [], None
    for seen, decision in play(TpPlanner(bounds), steps, sizes[start % len(sizes)]):
        if last is not None and last.change != "keep" and seen.tp == last.tp:
            carried_out.append(last.change)
        last = decision
        assert decision.tp in sizes
        wanted = {"keep": [seen.tp], "raise": [2 * seen.tp], "lower": [seen.tp / 2], "roll back": sizes}
        assert decision.tp in wanted[decision.change]
        assert (decision.change == "keep") == (decision.tp == seen.tp)
        for words in (decision.reason, decision.expected):
            assert words.strip()
            assert "\n" not in words
        assert f"TP {seen.tp}" in decision.reason
        if seen.preemptions is None:
            assert decision.change in ("keep", "roll back")
        if seen.preemptions != 0:
            assert decision.change != "lower"
    assert len(carried_out) <= max(bounds.settings.max_changes, 0)


@settings(deadline=None)
@given(bounds=some_bounds(), steps=st.lists(a_step(), max_size=60), start=st.integers(0, 100), seed=st.randoms())
def test_saving_at_any_moment_changes_no_decision(bounds, steps, start, seed):
    def sometimes_saved(planner):
        if seed.random() < 0.5:
            return planner
        resumed = TpPlanner(bounds)
        resumed.load_state_dict(json.loads(json.dumps(planner.state_dict(), allow_nan=False)))
        assert resumed.state_dict() == planner.state_dict()
        return resumed

    tp = bounds.sizes[start % len(bounds.sizes)]
    assert list(play(TpPlanner(bounds), steps, tp, sometimes_saved)) == list(play(TpPlanner(bounds), steps, tp))


def run(world, steps, tp, **chosen):
    """Carry out every decision; return the changes as (step, from, to, change)."""
    planner, changes = TpPlanner(TpBounds(TpSettings(**chosen), 8)), []
    for i in range(steps):
        kind, preemptions, seconds = world(i, tp)
        seen = Observation(kind, tp=tp, preemptions=preemptions, rollout_seconds=seconds, tokens=MANY)
        decision = planner.step(seen)
        if decision.change != "keep":
            changes.append((i, tp, decision.tp, decision.change))
        tp = decision.tp
    return changes, tp


@settings(deadline=None)
@given(
    mix=MIXES,
    preemptions=st.integers(1, 100_000),
    noise=st.lists(st.floats(0.98, 1.02), min_size=80, max_size=80),
    data=st.data(),
)
def test_constant_preemptions_never_change_the_size(mix, preemptions, noise, data):
    """With any scatter of 2%, and rollout seconds that are anything at all."""
    tp = data.draw(st.sampled_from([1, 2, 4, 8]))
    seconds = data.draw(st.lists(st.floats(1, 1000), min_size=80, max_size=80))
    changes, _ = run(lambda i, tp: (mix[i % len(mix)], max(1, round(preemptions * noise[i])), seconds[i]), 80, tp)
    assert changes == []


@settings(deadline=None)
@given(
    mix=MIXES,
    start=st.sampled_from([1, 2, 4, 8]),
    least=st.sampled_from([1, 2]),
    scatter=st.lists(st.floats(0.99, 1.01), min_size=120),
)
def test_without_preemptions_the_size_only_falls_to_the_least(mix, start, least, scatter):
    start = max(start, least)
    changes, end = run(lambda i, tp: (mix[i % len(mix)], 0, 100 * scatter[i % len(scatter)]), 120, start, min_tp=least)
    assert {change for *_, change in changes} <= {"lower"}
    assert end == least


@settings(deadline=None)
@given(
    mix=MIXES,
    preemptions=st.fixed_dictionaries(
        {(k, tp): st.integers(0, 3000) for k in ("short", "long", "all") for tp in (1, 2, 4, 8)}
    ),
    seconds=st.fixed_dictionaries(
        {(k, tp): st.floats(50, 200) for k in ("short", "long", "all") for tp in (1, 2, 4, 8)}
    ),
    calm=st.sets(st.sampled_from([1, 2, 4, 8])),
    start=st.sampled_from([1, 2, 4, 8]),
)
def test_a_world_that_depends_on_nothing_but_the_size_makes_no_flapping(mix, preemptions, seconds, calm, start):
    """Preemptions and seconds are any function of size and round kind: nothing is raised, and what was rolled back is tried at
    steps that are ever further apart."""

    def world(i, tp):
        kind = mix[i % len(mix)]
        return kind, 0 if tp in calm else preemptions[kind, tp], seconds[kind, tp]

    changes, end = run(world, 300, start, max_changes=MANY)
    assert {change for *_, change in changes} <= {"lower", "roll back"}
    for lowered, back in pairwise(changes):
        if back[3] == "roll back":
            assert back[1:3] == lowered[2:0:-1]
    tries = Counter((source, target) for _, source, target, change in changes if change == "lower")
    assert all(times <= 4 for times in tries.values())  # at least 25, 50 and 100 steps lie between
    assert end in (1, 2, 4, 8)


@settings(deadline=None)
@given(
    mix=MIXES,
    slower=st.floats(1.04, 3.0),
    jump=st.floats(1.3, 5.0),
    rises=st.booleans(),
    start=st.sampled_from([2, 4]),
)
def test_a_change_that_costs_time_is_undone(mix, slower, jump, rises, start):
    """Whether TP was raised or lowered, the run is back at its size within a check, and has stayed there for most of the time."""

    def world(i, tp):
        preemptions = (2000 if i < 30 else round(2000 * jump)) if rises else 0
        return mix[i % len(mix)], preemptions, 100.0 if tp == start else 100.0 * slower

    changes, end = run(world, 60, start, retry_steps=100)
    assert [change for *_, change in changes] == ["raise" if rises else "lower", "roll back"]
    (tried, *_), (undone, *_) = changes
    assert undone - tried <= 20
    assert end == start
