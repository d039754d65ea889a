"""Where a step's time goes, on steps made by hand, and what holds for any step."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_accel.telemetry import stage_clock
from rl_accel.telemetry.stage_clock import CANCELLED, COMPLETED, FAILED, Response


def response(began, generated, rewarded=None, ended=None, tokens=None, server=None, outcome=COMPLETED, prompt="p"):
    last = next(moment for moment in (ended, rewarded, generated) if moment is not None)
    return Response(prompt, began, generated, rewarded, last, tokens, server, outcome)


def test_stages_add_up_to_the_step_and_what_no_timer_covers_is_other():
    logged = {"timing_s/step": 10.0, "timing_s/gen": 6.0, "timing_s/adv": 1.0, "timing_s/update_actor": 2.0}
    logged |= {"timing_s/testing": 99.0, "timing_s/gen/part": 3.0, "loss": 5.0}
    found = stage_clock.stages(logged)
    assert found == {"gen": 6.0, "adv": 1.0, "update_actor": 2.0, "other": 1.0}
    assert stage_clock.shares(found) == {"gen": 0.6, "adv": 0.1, "update_actor": 0.2, "other": 0.1}


@pytest.mark.parametrize("logged", [{}, {"val/acc": 1.0}, {"timing_s/gen": 1.0}, {"timing_s/step": math.nan}])
def test_what_is_no_training_step_has_no_stages(logged):
    assert stage_clock.stages(logged) is None


def test_a_generation_is_cut_into_four_parts_that_follow_each_other():
    ten = [response(100.0, 101.0 + i, tokens=10 * (i + 1)) for i in range(9)]
    ten.append(response(100.0, 115.0, rewarded=117.0, tokens=150))
    found = stage_clock.generation(ten, 20.0)
    assert (found.most, found.waiting, found.reward, found.rest) == (9.0, 6.0, 2.0, 3.0)
    assert found.after_half == 10.0
    assert found.concurrency == 10
    assert found.idle == pytest.approx(1 - (45 + 15) / (10 * 20))
    assert found.seconds_per_token == pytest.approx(0.1)
    assert found.tokens == 600
    assert found.completion == stage_clock.Completion(5.0, 9.0, 17.0, 17.0)


def test_a_batch_that_is_full_until_the_end_is_not_idle():
    assert stage_clock.generation([response(0.0, 4.0), response(0.0, 4.0)], 4.0).idle == 0.0
    one_after_the_other = [response(0.0, 2.0), response(2.0, 4.0)]
    found = stage_clock.generation(one_after_the_other, 4.0)
    assert (found.concurrency, found.idle) == (1, 0.0)


def test_slots_of_the_engines_limit_the_capacity():
    queued = [response(0.0, 2.0), response(0.0, 4.0)]  # the second waits for the first
    assert stage_clock.generation(queued, 4.0).idle == pytest.approx(0.25)
    assert stage_clock.generation(queued, 4.0, slots=1).idle == 0.0
    assert stage_clock.generation(queued, 4.0, slots=64).idle == pytest.approx(0.25)


def test_cancelled_and_failed_responses_take_places_but_do_not_complete():
    responses = [
        response(0.0, 2.0, tokens=20),
        response(0.0, None, ended=3.0, outcome=CANCELLED, tokens=25),
        response(0.0, None, ended=1.0, outcome=FAILED),
    ]
    found = stage_clock.generation(responses, 3.0)
    assert (found.responses, found.completed, found.cancelled, found.failed) == (3, 1, 1, 1)
    assert (found.most, found.waiting, found.reward, found.rest) == (2.0, 0.0, 0.0, 1.0)
    assert found.idle == pytest.approx(1 - 6 / 9)
    assert found.tokens == 45


def test_what_cannot_be_known_is_none():
    assert stage_clock.generation([], 3.0) is None
    assert stage_clock.completion([]) is None
    found = stage_clock.generation([response(0.0, None, ended=1.0, outcome=CANCELLED)], 3.0)
    parts = (found.most, found.waiting, found.reward, found.rest, found.after_half)
    assert {*parts, found.completion, found.seconds_per_token} == {None}
    assert stage_clock.generation([response(0.0, 0.0)], 3.0).idle is None, "nothing was ever in generation"


def test_servers_are_told_apart_within_one_window():
    responses = [response(0.0, 4.0, server="a"), response(0.0, 2.0, server="b"), response(0.0, 1.0)]
    found = stage_clock.by_server(responses, 4.0)
    assert {name: part.idle for name, part in found.items()} == {"a": 0.0, "b": 0.5}


@pytest.mark.parametrize(("seconds", "slots"), [(0.0, None), (-1.0, None), (math.nan, None), (1.0, 0)])
def test_impossible_arguments_are_refused(seconds, slots):
    with pytest.raises(ValueError, match="found"):
        stage_clock.generation([response(0.0, 1.0)], seconds, slots=slots)


moments = st.floats(0, 100, allow_nan=False)


@st.composite
def noted(draw):
    began, *later = sorted(draw(st.lists(moments, min_size=4, max_size=4)))
    outcome = draw(st.sampled_from([COMPLETED, CANCELLED, FAILED]))
    generated = later[0] if outcome == COMPLETED or draw(st.booleans()) else None
    rewarded = later[1] if generated is not None and draw(st.booleans()) else None
    return Response("p", began, generated, rewarded, later[2], draw(st.integers(0, 50)), None, outcome)


@settings(max_examples=200)
@given(st.lists(noted(), min_size=1, max_size=12), st.floats(0.01, 200), st.randoms(), st.integers(1, 5))
def test_any_generation(responses, seconds, chance, slots):
    found = stage_clock.generation(responses, seconds)
    parts = [found.most, found.waiting, found.reward, found.rest]
    if found.completed:
        assert all(part >= 0 for part in parts)
        assert sum(parts) == pytest.approx(seconds)
    assert found.idle is None or 0 <= found.idle <= 1
    assert found.completed + found.cancelled + found.failed == found.responses == len(responses)
    limited = stage_clock.generation(responses, seconds, slots=slots)
    assert limited.idle is None or 0 <= limited.idle <= 1

    shuffled = list(responses)
    chance.shuffle(shuffled)
    assert stage_clock.generation(shuffled, seconds) == found


@given(st.dictionaries(st.sampled_from(stage_clock.STAGES), st.floats(0, 1e4)), st.floats(0, 1e4))
def test_shares_of_any_step_add_up_to_one(timed, other):
    whole = sum(timed.values()) + other
    found = stage_clock.stages({"timing_s/step": whole, **{f"timing_s/{s}": v for s, v in timed.items()}})
    assert sum(found.values()) == pytest.approx(whole)
    assert sum(stage_clock.shares(found).values()) == pytest.approx(1.0 if sum(found.values()) > 0 else 0.0)
