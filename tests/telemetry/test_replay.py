"""What tail batching would have made of times that were seen."""

import pytest

from rl_accel.telemetry.replay import prompt_seconds, replay
from rl_accel.telemetry.responses import CANCELLED, Response


def test_a_prompt_takes_until_the_last_of_its_rewards():
    responses = [
        Response("a", 10.0, 11.0, 12.0, 12.5),
        Response("a", 10.5, 14.0, 15.0, 15.5),
        Response("b", 10.0, 11.0, None, 11.5),
    ]
    assert prompt_seconds(responses) == [5.0, 1.5]
    assert prompt_seconds([]) is None
    assert prompt_seconds([*responses, Response("b", 10.0, ended=11.0, outcome=CANCELLED)]) is None


def test_equal_times_save_nothing():
    found = replay([[3.0] * 4, [3.0] * 4])
    assert (found.as_it_is, found.in_rounds, found.saved) == (3.0, 3.0, 0.0)
    assert (found.prompts, found.launched, found.known) == (4, 5, 8)


def test_one_long_prompt_a_step_waits_for_a_round_of_its_like():
    # Short rounds of 10 launch 13 and nearly always put off the long ones; three in thirteen are put off, which makes three
    # long rounds of ten for every ten short ones.
    steps = [[1.0] * 9 + [20.0]] * 50
    found = replay(steps, ratio=1.25)
    assert found.as_it_is == 20.0
    assert found.in_rounds == pytest.approx((10 * 1 + 3 * 20) / 13, rel=0.1)


def test_a_ratio_of_one_is_the_run_itself():
    steps = [[1.0, 2.0, 3.0, 4.0]] * 10
    found = replay(steps, ratio=1.0)
    assert found.in_rounds == pytest.approx(sum(4 * (1 - (k / 4) ** 4) / 4 for k in range(4)), rel=0.02), (
        "mean of the largest of 4"
    )


def test_without_prompts_there_is_nothing_to_play():
    assert replay([]) is None
    assert replay([[]]) is None
