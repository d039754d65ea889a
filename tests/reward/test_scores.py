"""Tests which rewards are usable, which count as correct, and the substitutes for missing rewards."""

import decimal
import enum

import numpy as np
import pytest

from rl_accel.features import RewardTimeoutFlags
from rl_accel.reward.adaptive_timeout import LocalAnchors
from rl_accel.reward.limited_executor import ExecutionResult
from rl_accel.reward.scores import GraderError, Scores

FAILED = ExecutionResult(verdict="error", value=None, reason="KeyError: 'x'")
STOPPED = ExecutionResult(verdict="timeout")


def done(value):
    return ExecutionResult(verdict="done", value=value)


def of_slime(*keys, **flags):
    number_keys = keys[:1] or ("acc", "score")
    return Scores(RewardTimeoutFlags(**flags), LocalAnchors(), keys, number_keys, number_keys, numbers_only=False)


def of_verl(**flags):
    return Scores(RewardTimeoutFlags(**flags), LocalAnchors(), (), ("score",), ("acc", "score"), numbers_only=True)


@pytest.mark.parametrize(
    ("rewards", "problem"),
    [
        ([1.0, 0, True, -1, {"score": 1.0}, {"verdict": "fine"}, "text"], ""),
        ([None], "returned None"),
        ([0.0, float("nan")], "returned nan"),
        ([float("-inf")], "returned -inf"),
        ([{"score": float("nan")}], "returned nan"),
        ([{"acc": float("inf"), "score": 1.0}], "returned inf"),
        (3.0, "returned no list of 1 rewards"),
    ],
)
def test_a_reward_that_slime_cannot_train_on_is_known(rewards, problem):
    result = of_slime().problem(done(rewards), len(rewards) if isinstance(rewards, list) else 1)
    assert problem in result
    assert bool(result) == bool(problem)


def test_a_reward_without_the_key_that_the_framework_looks_up_is_of_no_use():
    assert of_slime("acc").problem(done({"score": 1.0})) == "it returned a dict without 'acc'"
    assert of_slime("acc").problem(done({"acc": 1})) == ""
    assert of_slime().problem(done([1.0]), 2) == "it returned no list of 2 rewards"
    assert of_slime("score", "acc").problem(done({"acc": 1}), teach=False) == ""
    assert of_slime("score", "acc").problem(done({"acc": 1})) == "it returned a dict without 'score'"


@pytest.mark.parametrize(
    "value", [None, "text", {"acc": 1.0}, {"score": None}, float("nan"), {"score": "x"}, [1, 2], 10**400]
)
def test_where_only_numbers_are_rewards_anything_else_is_none(value):
    assert of_verl().problem(done(value))


def test_what_was_stopped_or_raised_is_no_reward():
    assert of_verl().problem(FAILED) == "KeyError: 'x'"
    assert of_verl().problem(STOPPED) == "timeout"


def test_correct_is_what_scores_above_a_bound_by_the_key_then_acc_then_score():
    assert of_slime().is_correct(done([0.0, 0.5]), 2)
    assert not of_slime(correct_above=0.5).is_correct(done([0.5, {"other": 1}, "text"]), 3)
    for scores in (of_slime(), of_verl()):
        assert not scores.is_correct(done({"acc": False, "score": 1.0}))
        assert scores.is_correct(done({"score": 1.0}))
        assert not scores.is_correct(ExecutionResult(verdict="timeout", value=1.0))
    assert of_slime("score").is_correct(done({"acc": False, "score": 1.0}))
    assert not of_verl().is_correct(done({"acc": "yes", "score": 1.0}))


async def test_a_stand_in_looks_like_rewards_of_its_source_or_else_of_another():
    scores = of_slime(timeout_score=-1.0, score_errors=True)
    assert await scores.reward_of(FAILED, "a", True) == -1.0, "nothing is known"
    good = {"score": 1.0, "acc": True, "pred": "x", "n": 3, "other": object(), "mean": np.float32(2)}
    assert await scores.reward_of(done(good), "a", True) is good
    empty = {"score": -1.0, "acc": False, "pred": "", "n": 0, "other": None, "mean": np.float32(0)}
    assert await scores.reward_of(FAILED, "a", True) == empty
    assert type((await scores.reward_of(FAILED, "a", True))["mean"]) is np.float32
    assert await scores.reward_of(FAILED, "b", True) == empty, "rewards of one batch have one form"
    assert await scores.reward_of(done([0.5, 0.25]), "b", True, 2) == [0.5, 0.25]
    assert await scores.reward_of(FAILED, "b", True, 2) == [-1.0, -1.0]
    assert await scores.reward_of(FAILED, "a", True) == empty


async def test_a_stand_in_has_numbers_where_verl_averages_and_the_form_of_a_list():
    right = enum.IntEnum("Kind", ["RIGHT"]).RIGHT
    good = {"score": 1.0, "kind": right, "exact": decimal.Decimal("0.5"), "parts": np.ones(2), "name": np.str_("x")}
    scores = of_verl()
    await scores.reward_of(done(good), "a", True)
    result = await scores.reward_of(STOPPED, "a", True)
    assert result.pop("parts").tolist() == [0.0, 0.0]
    assert result == {"score": 0.0, "kind": 0, "exact": 0, "name": ""}
    scores = of_slime(timeout_score=-1.0)
    await scores.reward_of(done((0.5, True, {"turns": 2}, "why")), "a", True)
    assert await scores.reward_of(STOPPED, "a", True) == (-1.0, False, {}, "")


def test_rewards_of_a_group_are_anything_that_has_a_length_and_items():
    scores = of_slime()
    assert scores.is_correct(done(np.array([0.0, 1.0])), 2)
    for value in (np.array([1.0]), np.array(1.0), {"a": 1, "b": 2}, "ab", 3.0, None):
        assert scores.problem(done(value), 2) == "it returned no list of 2 rewards"


async def test_a_stand_in_has_the_keys_that_the_framework_looks_up():
    scores = of_slime("acc", "eval_acc", timeout_score=-1.0, score_errors=True)
    assert await scores.reward_of(FAILED, "a", True) == {"acc": -1.0, "eval_acc": -1.0}
    await scores.reward_of(done({"acc": 1.0, "pred": "x"}), "a", True)
    assert await scores.reward_of(FAILED, "a", True) == {"acc": -1.0, "eval_acc": -1.0, "pred": ""}


async def test_errors_are_counted_apart_from_what_was_stopped_and_each_kind_logged_once(caplog):
    anchors, flags = LocalAnchors(), RewardTimeoutFlags(score_errors=True)
    scores = Scores(flags, anchors, (), ("score",), ("score",), numbers_only=True)
    for result in (FAILED, ExecutionResult(verdict="error", value=None, reason="KeyError: 'y'"), done(None)):
        assert await scores.reward_of(result, "a", True) == 0.0
    await scores.reward_of(FAILED, "a", False)
    await scores.reward_of(ExecutionResult(verdict="killed", value=None, reason="memory limit"), "a", True)
    await scores.reward_of(ExecutionResult(verdict="timeout", value=None, reason="wall limit"), "a", True)
    assert anchors.totals == {"errors": 3.0, "eval_errors": 1.0}
    kinds = ("KeyError: 'x'", "returned None", "memory limit")
    assert [[kind for kind in kinds if kind in line] for line in caplog.messages] == [[kind] for kind in kinds]


async def test_what_a_grader_raises_or_returns_is_for_the_framework_and_counted():
    raised = KeyError("x")
    for scores in (of_verl(), of_slime()):
        with pytest.raises(KeyError) as found:
            await scores.reward_of(ExecutionResult(verdict="error", reason="KeyError: 'x'", error=raised), "a", True)
        assert found.value is raised
        with pytest.raises(GraderError, match="from a: its process ended with 3"):
            await scores.reward_of(ExecutionResult(verdict="killed", reason="its process ended with 3"), "a", True)
        assert await scores.reward_of(done(None), "a", True) is None
        assert await scores.reward_of(ExecutionResult(verdict="timeout"), "a", True) == 0.0
        assert scores.anchors.totals == {"errors": 2.0}


async def test_a_stopped_answer_that_scores_more_than_a_wrong_one_is_said_once(caplog):
    scores = of_verl()
    await scores.reward_of(done({"score": 0.5}), "a", True)
    assert await scores.reward_of(STOPPED, "a", True) == {"score": 0.0}
    assert not caplog.messages
    await scores.reward_of(done(-1.0), "a", True)
    for _ in range(2):
        await scores.reward_of(STOPPED, "a", True)
    (line,) = caplog.messages
    assert "from a gets 0, more than the -1 of a wrong one: set rl_accel.reward_timeout.timeout_score" in line
