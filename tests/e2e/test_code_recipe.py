"""The recipe of rewards that hang, as a user runs it: both arms train on the same scores, and one of them does not wait."""

import json
import subprocess
import sys

import pytest

from rl_accel.telemetry.stage_clock import read_log

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1200)]

STEPS = 4


@pytest.fixture(scope="module")
def out(repo, tmp_path_factory, clean_environment):
    """Run both arms for a few steps."""
    out = tmp_path_factory.mktemp("recipe")
    words = [sys.executable, "-m", "rl_accel", "ab", "examples/verl_code_reward", "--out", str(out)]
    done = subprocess.run(
        [*words, "--steps", str(STEPS)], cwd=repo, env=clean_environment, capture_output=True, text=True
    )
    assert (out / "summary.json").exists(), done.stdout[-4000:] + done.stderr[-4000:]
    return out


def test_both_arms_see_the_same_scores(out):
    checks = {check["name"]: check for check in json.loads((out / "summary.json").read_text())["checks"]}
    assert checks["completed"]["status"] == checks["identical"]["status"] == "green", checks


def test_answers_that_hang_were_stopped_long_before_the_full_budget(out):
    steps = read_log(out / "adaptive-seed0" / "metrics.jsonl")
    found = {
        name: sum(metrics.get(f"rl_accel/reward_timeout/{name}", 0.0) for metrics in steps.values())
        for name in ("executions", "timeouts", "timeouts_full", "saved_seconds", "errors")
    }
    assert (
        64 * (STEPS - 1) < found["executions"] <= 64 * STEPS
    )  # told once a second: the last may come after the last step
    assert found["timeouts"] >= 3
    assert found["timeouts_full"] < found["timeouts"]
    assert found["saved_seconds"] > 3 * (found["timeouts"] - found["timeouts_full"])
    assert found["errors"] == 0
