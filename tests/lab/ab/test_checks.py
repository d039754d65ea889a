import math

import pytest

from rl_accel.lab.ab import report


@pytest.fixture
def judge(make_runs, tmp_path):
    """Run the checks on runs given as arm -> list of metrics, a step each."""

    def check(name, arms, asked=None, status="done", **checks):
        recipe, results, runs = make_runs({f"{arm}-seed0": steps for arm, steps in arms.items()}, checks=checks)
        results[0].status = status
        summary = report.summarise(recipe, tmp_path, results, asked or len(arms), runs)
        return next((check for check in summary["checks"] if check["name"] == name), None)

    return check


REWARD, PROBS = "critic/score/mean", "training/rollout_probs_diff_max"
STEP = {"timing_s/step": 2.0, "timing_s/adv": 1.0}
FAST = {"timing_s/step": 1.0, "timing_s/adv": 0.1}


def both(stock, accelerated):
    return {"stock": stock, "accelerated": accelerated}


def logged(metric, *values):
    """One arm that logged these."""
    return {"stock": [{metric: value} for value in values]}


NAN = math.nan
SAME = both([{REWARD: 0.1}, {REWARD: NAN}], [{REWARD: 0.1}, {REWARD: NAN}])
PARTED = both([{REWARD: 0.1}, {REWARD: NAN}], [{REWARD: 0.1}, {REWARD: 0.25}])
LEARNS = logged(REWARD, 0.0, 1.0)
ARMS = both([STEP] * 4, [FAST] * 4)
VALIDATED = both(
    [STEP] * 2 + [STEP, {**STEP, "timing_s/testing": 1.0}], [FAST] * 2 + [FAST, {**FAST, "timing_s/testing": 0.5}]
)
"""Two steps of warm-up, one step without a validation and one with it."""
TRAINED = both([{REWARD: 0.5, "actor/pg_loss": 0.1}] * 2, [{REWARD: 0.5, "actor/pg_loss": 0.1005}] * 2)
ONE = {"stock": [STEP]}


@pytest.mark.parametrize(
    ("name", "arms", "keys", "status", "detail"),
    [
        ("completed", ONE, {}, "green", ""),
        ("completed", ONE, {"status": "failed"}, "red", "stock-seed0: failed (why)"),
        ("completed", ONE, {"asked": 2}, "red", "1 of 2 runs were not started"),
        ("identical", SAME, {"identical": [REWARD]}, "green", ""),
        ("identical", PARTED, {"identical": [REWARD]}, "red", "of accelerated seed 0 parts at step 2: nan and 0.25"),
        ("identical", {"stock": [{REWARD: 0.1}]}, {"identical": [REWARD]}, "skipped", ""),
        ("identical", SAME, {"identical": ["absent"]}, "red", ""),
        ("identical", SAME, {}, None, ""),
        ("rollout_probs_diff", logged(PROBS, 1e-9, 1e-8), {"rollout_probs_diff": 1e-3}, "green", "step 2"),
        ("rollout_probs_diff", logged(PROBS, 1e-9, 2e-3), {"rollout_probs_diff": 1e-3}, "red", "step 2"),
        ("rollout_probs_diff", logged(PROBS, 1e-9, NAN), {"rollout_probs_diff": 1e-3}, "red", "step 2"),
        ("rollout_probs_diff", ONE, {}, "skipped", "calculate_log_probs"),
        ("rollout_probs_diff", ONE, {"rollout_probs_diff": None}, None, ""),
        ("reward_gain", LEARNS, {"reward_gain": 0.5}, "green", ""),
        ("reward_gain", LEARNS, {"reward_gain": 1.5}, "red", ""),
        ("reward_gain", ONE, {"reward_gain": 0.1}, "red", ""),
        ("reward_gain", LEARNS, {}, None, ""),
        ("faster", ARMS, {"faster": {"adv": 9.0, "step": 2.0}}, "green", ""),
        ("faster", ARMS, {"faster": {"adv": 11.0, "step": 1.0}}, "red", "adv 10.00x (accelerated), wanted 11x"),
        ("faster", ARMS, {"faster": {"values": 1.0}}, "red", ""),
        ("faster", VALIDATED, {"faster": {"accelerated": 2.0, "testing": 2.0}}, "green", "step 2.00x (accelerated)"),
        (
            "faster",
            VALIDATED,
            {"faster": {"accelerated": 3.0}},
            "red",
            "its seconds are other 0.65, testing 0.25, adv 0.10",
        ),
        ("same_training", TRAINED, {"same_training": {"accelerated": 1e-3}}, "green", "up to 0.0005 in 2 steps"),
        (
            "same_training",
            TRAINED,
            {"same_training": {"accelerated": 1e-4}},
            "red",
            "actor/pg_loss of accelerated-seed0",
        ),
        ("same_training", SAME, {"same_training": {"accelerated": 1.0}}, "red", "in 0 steps"),
        ("same_training", ONE, {"same_training": {"accelerated": 1.0}}, "skipped", ""),
        ("faster", ONE, {"faster": {"adv": 2.0}}, "skipped", ""),
        ("faster", ARMS, {"faster": {"adv": 11.0}, "warn_only": ["faster"]}, "red", ""),
    ],
)
def test_a_check_turns_green_red_or_skipped_or_is_left_out(judge, name, arms, keys, status, detail):
    result = judge(name, arms, **keys)
    assert status == (result and result["status"])
    if result is not None:
        assert detail in result["detail"]
        assert result["failed"] == (status == "red" and "warn_only" not in keys)


def test_a_check_without_anything_to_judge_is_never_green(make_runs, tmp_path):
    """A comparison that is interrupted before its first step."""
    recipe, results, _ = make_runs({"stock-seed0": [STEP]}, checks={"reward_gain": 0.1})
    checks = report.summarise(recipe, tmp_path, results, 2, [])["checks"]
    assert {check["name"] for check in checks if check["status"] == "skipped"} == {"rollout_probs_diff", "reward_gain"}
