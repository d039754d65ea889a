"""Each check turns green, red or skipped for the right reason."""

import math

import pytest

from rl_accel.lab.ab.checks import run_checks
from rl_accel.lab.ab.recipe import load
from rl_accel.lab.ab.runner import RunResult
from rl_accel.lab.ab.stats import RunData, stage_table


@pytest.fixture
def judge(recipe_file, tmp_path):
    """Run the checks on runs given as arm -> list of metrics, a step each."""

    def check(name, arms, asked=None, status="done", logs=None, **checks):
        recipe = load(recipe_file(checks=checks))
        runs = [RunData(arm, 0, dict(enumerate(steps, 1))) for arm, steps in arms.items()]
        results = [RunResult(arm, 0, 2, "f", [], {}, status=status, message="why") for arm in arms]
        for arm, text in (logs or {}).items():
            (tmp_path / f"{arm}-seed0").mkdir()
            (tmp_path / f"{arm}-seed0" / "train.log").write_text(text)
        stages = stage_table(runs, list(arms), recipe.baseline, recipe.metrics)
        found = run_checks(recipe, results, runs, stages, None, {"rows": []}, tmp_path, asked or len(arms))
        return next((check for check in found if check.name == name), None)

    return check


REWARD = "critic/score/mean"
STEP = {"timing_s/step": 2.0, "timing_s/adv": 1.0}
FAST = {"timing_s/step": 1.0, "timing_s/adv": 0.1}


def test_completed(judge):
    assert judge("completed", {"stock": [STEP]}).status == "green"
    failed = judge("completed", {"stock": [STEP]}, status="failed")
    assert (failed.status, failed.failed, failed.detail) == ("red", True, "stock-seed0: failed (why)")
    assert "1 of 2 runs were not started" in judge("completed", {"stock": [STEP]}, asked=2).detail


def test_identical(judge):
    same = {"stock": [{REWARD: 0.1}, {REWARD: math.nan}], "accelerated": [{REWARD: 0.1}, {REWARD: math.nan}]}
    assert judge("identical", same, identical=[REWARD]).status == "green"
    other = same | {"accelerated": [{REWARD: 0.1}, {REWARD: 0.25}]}
    parted = judge("identical", other, identical=[REWARD])
    assert parted.status == "red"
    assert "of accelerated seed 0 parts at step 2: nan and 0.25" in parted.detail
    assert judge("identical", {"stock": [{REWARD: 0.1}]}, identical=[REWARD]).status == "skipped"
    assert judge("identical", same, identical=["absent"]).status == "red"
    assert judge("identical", same) is None


@pytest.mark.parametrize(("value", "status"), [(1e-8, "green"), (2e-3, "red"), (math.nan, "red")])
def test_rollout_probs_diff(judge, value, status):
    metrics = [{"training/rollout_probs_diff_max": 1e-9}, {"training/rollout_probs_diff_max": value}]
    found = judge("rollout_probs_diff", {"stock": metrics}, rollout_probs_diff=1e-3)
    assert found.status == status
    assert "step 2" in found.detail


def test_rollout_probs_diff_that_was_not_logged_says_how_to_log_it(judge):
    found = judge("rollout_probs_diff", {"stock": [STEP]})
    assert found.status == "skipped"
    assert "calculate_log_probs" in found.detail
    assert judge("rollout_probs_diff", {"stock": [STEP]}, rollout_probs_diff=None) is None


def test_first_step_zero(judge):
    assert judge("first_step_zero", {"stock": [{"actor/kl_loss": 0.0}, {"actor/kl_loss": 1.0}]}).status == "green"
    assert judge("first_step_zero", {"stock": [{"actor/kl_loss": 0.1}]}).status == "red"
    assert judge("first_step_zero", {"stock": [{"actor/kl_loss": math.nan}]}).status == "red"
    assert judge("first_step_zero", {"stock": [STEP]}).status == "skipped"


def test_forbidden_log_names_the_line(judge):
    found = judge("forbidden_log", {"stock": [STEP]}, logs={"stock": "fine\na dtype mismatch: bf16\n"})
    assert (found.status, found.detail) == ("red", "stock-seed0/train.log line 2: a dtype mismatch: bf16")


def test_forbidden_log_is_green_on_a_clean_log(judge):
    assert judge("forbidden_log", {"stock": [STEP]}, logs={"stock": "fine\n"}).status == "green"


def test_reward_gain(judge):
    learns = {"stock": [{REWARD: 0.0}, {REWARD: 1.0}]}
    assert judge("reward_gain", learns, reward_gain=0.5).status == "green"
    assert judge("reward_gain", learns, reward_gain=1.5).status == "red"
    assert judge("reward_gain", {"stock": [STEP]}, reward_gain=0.1).status == "red"
    assert judge("reward_gain", learns) is None


def test_faster(judge):
    arms = {"stock": [STEP] * 4, "accelerated": [FAST] * 4}
    assert judge("faster", arms, faster={"adv": 9.0, "step": 2.0}).status == "green"
    slow = judge("faster", arms, faster={"adv": 11.0, "step": 1.0})
    assert (slow.status, slow.failed) == ("red", True)
    assert "adv 10.00x (accelerated), wanted 11x" in slow.detail
    assert judge("faster", arms, faster={"values": 1.0}).status == "red"
    assert judge("faster", {"stock": [STEP]}, faster={"adv": 2.0}).status == "skipped"


def test_a_check_that_only_warns_is_red_without_failing(judge):
    arms = {"stock": [FAST] * 4, "accelerated": [STEP] * 4}
    found = judge("faster", arms, faster={"step": 1.0}, warn_only=["faster"])
    assert (found.status, found.failed) == ("red", False)
