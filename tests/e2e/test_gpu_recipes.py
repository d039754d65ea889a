"""A recipe for GPUs on its platform cpu: the same file, a tiny model, real vLLM."""

import json
import subprocess

import pytest

from rl_accel.telemetry.logs import read_log

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1500)]


@pytest.fixture
def ab(repo, tmp_path, clean_environment):
    """``ab(python, example, *options)``: run the recipe's arms and return the folder of the runs."""

    def run(python, example, *options):
        words = [python, "-m", "rl_accel", "ab", f"examples/{example}", "--out", str(tmp_path), *options]
        done = subprocess.run(words, cwd=repo, env=clean_environment, capture_output=True, text=True)
        assert (tmp_path / "summary.json").exists(), done.stdout[-4000:] + done.stderr[-4000:]
        summary = json.loads((tmp_path / "summary.json").read_text())
        checks = {check["name"]: check["status"] for check in summary["checks"]}
        assert checks["completed"] == "green", done.stdout[-4000:]
        return tmp_path

    return run


@pytest.mark.vllm
@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
@pytest.mark.parametrize(
    ("example", "arm", "feature"),
    [
        ("verl_dapo_math", "tail_drafts", "drafts/tokens_an_engine_step"),
        ("verl_code", "timeout", "reward_timeout/executions"),
    ],
)
def test_a_recipe_for_gpus_trains_on_its_platform_cpu(example, arm, feature, ab, engine):
    out = ab(engine.python, example, "--platform", "cpu", "--steps", "2", "--arms", arm)
    steps = read_log(out / f"{arm}-seed0" / "metrics.jsonl")
    assert list(steps) == [1, 2]
    assert all(metrics["training/rollout_probs_diff_max"] < 1e-4 for metrics in steps.values())
    assert "vLLMHttpServer" in (out / f"{arm}-seed0" / "train.log").read_text(errors="replace")
    assert steps[2][f"rl_accel/{feature}"] > 0
