"""Runs a recipe for GPUs with its platform "cpu": the same file with a tiny model and real vLLM."""

import pytest

from rl_accel.telemetry.logs import read_log

pytestmark = [pytest.mark.full]


@pytest.mark.vllm
@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
@pytest.mark.parametrize(
    ("example", "arm", "feature"),
    [
        ("verl_dapo_math", "tail_drafts", "drafts/tokens_an_engine_step"),
        ("verl_code", "timeout", "reward_timeout/executions"),
    ],
)
def test_a_recipe_for_gpus_trains_on_its_platform_cpu(example, arm, feature, ab, engine, tmp_path):
    options = ("--platform", "cpu", "--steps", "2", "--arms", arm)
    summary = ab(f"examples/{example}", tmp_path, *options, python=engine.python)
    assert {check["name"]: check["status"] for check in summary["checks"]}["completed"] == "green"
    steps = read_log(tmp_path / f"{arm}-seed0" / "metrics.jsonl")
    assert list(steps) == [1, 2]
    assert all(metrics["training/rollout_probs_diff_max"] < 1e-4 for metrics in steps.values())
    assert "vLLMHttpServer" in (tmp_path / f"{arm}-seed0" / "train.log").read_text(errors="replace")
    assert steps[2][f"rl_accel/{feature}"] > 0
