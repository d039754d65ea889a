"""Tests the division of a step's time on hand-made and random steps, and the file of responses."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_accel.telemetry import stage_clock
from rl_accel.telemetry.stage_clock import CANCELLED, COMPLETED, FAILED, ResponseTimes, keep, read_kept

PARTS = ("most_seconds", "waiting_seconds", "reward_seconds", "rest_seconds")
moments = st.floats(0, 100, allow_nan=False)


def response(began, generated, rewarded=None, ended=None, tokens=None, server=None, outcome=COMPLETED, prompt="p"):
    last = next(moment for moment in (ended, rewarded, generated) if moment is not None)
    return ResponseTimes(prompt, began, generated, rewarded, last, tokens, server, outcome)


def test_stages_add_up_to_the_step_without_its_validation_and_what_no_timer_covers_is_other():
    logged = {"timing_s/step": 10.0, "timing_s/gen": 6.0, "timing_s/adv": 1.0, "timing_s/update_actor": 2.0}
    logged |= {"timing_s/testing": 10.0, "timing_s/gen/part": 3.0, "loss": 5.0}
    stages = stage_clock.stages(logged)
    assert stages == {"gen": 6.0, "adv": 1.0, "update_actor": 2.0, "other": 1.0}
    assert stage_clock.shares(stages) == {"gen": 0.6, "adv": 0.1, "update_actor": 0.2, "other": 0.1}
    assert stage_clock.stages({**logged, "timing_s/step": 20.0}) == stages, (
        "verl's older trainer validates within the step"
    )
    for logged in ({}, {"val/acc": 1.0}, {"timing_s/gen": 1.0}, {"timing_s/step": math.nan}):
        assert stage_clock.stages(logged) == {}


def test_a_generation_is_cut_into_four_parts_that_follow_each_other():
    ten = [response(100.0, 101.0 + i, tokens=10 * (i + 1)) for i in range(9)]
    ten.append(response(100.0, 115.0, rewarded=117.0, tokens=150))
    parts = stage_clock.generation(ten, 20.0)
    assert [parts[part] for part in PARTS] == [9.0, 6.0, 2.0, 3.0]
    assert (parts["after_half_seconds"], parts["concurrency"]) == (10.0, 10)
    assert parts["idle_share"] == pytest.approx(1 - (45 + 15) / (10 * 20))
    assert parts["seconds_per_token"] == pytest.approx(0.1)
    seconds = {"p50": 5.0, "p90": 9.0, "p99": 17.0, "longest": 17.0}
    completion = {f"completion_{name}_seconds": value for name, value in seconds.items()}
    assert stage_clock.completion(ten) == {"responses": 10, "tokens": 600, **completion}


@pytest.mark.parametrize(
    ("moments", "more", "concurrency", "idle"),
    [
        ([(0.0, 4.0), (0.0, 4.0)], {}, 2, 0.0),
        ([(0.0, 2.0), (2.0, 4.0)], {}, 1, 0.0),  # one after the other
        ([(0.0, 2.0), (0.0, 4.0)], {"slots": None}, 2, 0.25),
        ([(0.0, 2.0), (0.0, 4.0)], {"slots": 1}, 2, 0.0),  # the second waits for the first
        ([(0.0, 2.0), (0.0, 4.0)], {"slots": 64}, 2, 0.25),
        ([(2.0, 4.0)], {"began": 0.0}, 1, 0.5),  # it begins before a response
    ],
)
def test_the_idle_share_of_four_seconds(moments, more, concurrency, idle):
    parts = stage_clock.generation([response(*moment) for moment in moments], 4.0, **more)
    assert (parts["concurrency"], parts["idle_share"]) == (concurrency, pytest.approx(idle))


def test_cancelled_and_failed_responses_take_places_but_do_not_complete():
    responses = [response(0.0, 2.0, tokens=20), response(0.0, None, ended=1.0, outcome=FAILED)]
    responses.append(response(0.0, None, ended=3.0, outcome=CANCELLED, tokens=25))
    parts = stage_clock.generation(responses, 3.0)
    assert parts["cancelled"] == 1
    assert [parts[part] for part in PARTS] == [2.0, 0.0, 0.0, 1.0]
    assert parts["idle_share"] == pytest.approx(1 - 6 / 9)
    counts = stage_clock.completion(responses)
    assert (counts["responses"], counts["tokens"], counts["completion_longest_seconds"]) == (3, 45, 2.0)


def test_what_cannot_be_known_is_left_out():
    assert stage_clock.completion([]) == {}
    cancelled = [response(0.0, None, ended=1.0, outcome=CANCELLED)]
    assert stage_clock.completion(cancelled) == {"responses": 1, "tokens": 0}
    assert stage_clock.generation(cancelled, 3.0).keys() == {"cancelled", "concurrency", "idle_share"}
    assert "idle_share" not in stage_clock.generation([response(0.0, 0.0)], 3.0), "nothing was ever in generation"


@st.composite
def noted(draw):
    began, *later = sorted(draw(st.lists(moments, min_size=4, max_size=4)))
    outcome = draw(st.sampled_from([COMPLETED, CANCELLED, FAILED]))
    generated = later[0] if outcome == COMPLETED or draw(st.booleans()) else None
    rewarded = later[1] if generated is not None and draw(st.booleans()) else None
    return ResponseTimes("p", began, generated, rewarded, later[2], draw(st.integers(0, 50)), None, outcome)


@settings(max_examples=200)
@given(st.lists(noted(), min_size=1, max_size=12), st.floats(0.01, 200), st.randoms(), st.integers(1, 5))
def test_any_generation(responses, seconds, chance, slots):
    parts = stage_clock.generation(responses, seconds)
    if any(each.outcome == COMPLETED for each in responses):
        assert all(parts[part] >= 0 for part in PARTS)
        assert sum(parts[part] for part in PARTS) == pytest.approx(seconds)
    assert 0 <= parts.get("idle_share", 0) <= 1
    assert 0 <= stage_clock.generation(responses, seconds, slots=slots).get("idle_share", 0) <= 1

    shuffled = list(responses)
    chance.shuffle(shuffled)
    assert stage_clock.generation(shuffled, seconds) == parts


@given(st.dictionaries(st.sampled_from(list(stage_clock.STAGES)), st.floats(0, 1e4)), st.floats(0, 1e4))
def test_shares_of_any_step_add_up_to_one(timed, other):
    whole = sum(timed.values()) + other
    validation = timed.get("testing", 0.0)
    stages = stage_clock.stages({"timing_s/step": whole, **{f"timing_s/{s}": v for s, v in timed.items()}})
    assert sum(stages.values()) == pytest.approx(whole - validation)
    assert sum(stage_clock.shares(stages).values()) == pytest.approx(1.0 if sum(stages.values()) > 0 else 0.0)


def test_responses_that_are_kept_are_read_back_with_times_since_the_first_of_them(tmp_path):
    path = tmp_path / "deeper" / "kept.jsonl"
    responses = [ResponseTimes("first", 1000.0, 1002.5, 1003.0, 1003.25, 25, "b")]
    responses.append(ResponseTimes("second", 1000.5, None, None, 1004.0, None, None, CANCELLED))
    responses.append(ResponseTimes("first", 1000.25, 1001.0, 1001.5, 1001.5, 7, "a"))
    keep(path, 3, responses)
    keep(path, 4, [])
    with path.open("a") as file:  # lines that are not whole are left out
        file.write('\n\n{\n[]\nnull\n{"step": 2}\n{"step": "x"}\n{"step": 2, "responses": [[]]}\n')
    read = [
        ResponseTimes("0", 0.0, 2.5, 3.0, 3.25, 25, "b"),
        ResponseTimes("1", 0.5, None, None, 4.0, None, None, CANCELLED),
    ]
    read.append(ResponseTimes("0", 0.25, 1.0, 1.5, 1.5, 7, "a"))
    assert read_kept(path) == {3: read, 4: []}


def test_a_run_that_begins_again_replaces_the_steps_it_does_again(tmp_path):
    path = tmp_path / "kept.jsonl"
    for step in (1, 2, 3, 4):
        keep(path, step, [response(0.0, 1.0)])
    with path.open("a") as file:
        file.write('\n{"step": 5, "resp')  # the process was killed
    keep(path, 3, [])
    assert {step: len(responses) for step, responses in read_kept(path).items()} == {1: 1, 2: 1, 3: 0}
    keep(path, 1, [])
    assert read_kept(path) == {1: []}
