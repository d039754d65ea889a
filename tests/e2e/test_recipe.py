"""Runs both arms of the recipe for two steps: training has the same bits, and the flags reach every process."""

import json
import subprocess
import sys

import pandas
import pytest
import transformers

pytestmark = [pytest.mark.timeout(1200)]  # two runs of the trainer in the first set-up


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The folder that ``rl-accel ab`` writes."""
    return tmp_path_factory.mktemp("recipe") / "ab"


@pytest.fixture(scope="module")
def probes(tmp_path_factory):
    """The folder of what the status probe finds."""
    return tmp_path_factory.mktemp("status")


@pytest.fixture(scope="module", autouse=True)
def summary(ab, out, probes, probe_environment):
    return ab("examples/verl_ppo_cpu/recipe.yaml", out, "--steps=2", env=probe_environment(probes))


def test_every_metric_of_training_is_identical(out, summary):
    assert {run["status"] for run in summary["runs"]} == {"done"}
    assert (out / "report.html").stat().st_size > 10_000
    checks = {check["name"]: check for check in summary["checks"]}
    for name in ("identical", "rollout_probs_diff"):
        assert checks[name]["status"] == "green", checks[name]


def test_flags_of_the_run_reach_every_process_of_that_arm_alone(probes, read_processes):
    processes = read_processes(probes)
    for role in ("TaskRunnerV1", "WorkerDict", "AgentLoopWorker", "RewardLoopWorker"):
        # One process of each role an arm; the stock arm has no flags at all.
        assert sorted(p.requested["gae"] for p in processes if p.role == role) == ["by name", "off"], processes
    (trainer,) = [p for p in processes if p.role == "TaskRunnerV1" and p.requested["gae"] == "by name"]
    assert trainer.states["gae"] == trainer.states["sampler"] == {"applied"}


def test_verls_own_log_says_what_was_applied_and_saved(out):
    def steps(arm):
        lines = (out / f"{arm}-seed0" / "metrics.jsonl").read_text().splitlines()
        return [row["data"] for row in map(json.loads, lines) if row["step"] >= 1]

    for metrics in steps("accelerated"):
        assert metrics["rl_accel/gae/applied"] == metrics["rl_accel/sampler/applied"] == 1.0
        assert metrics["rl_accel/gae/kernel/numba"] == 1.0
        assert metrics["rl_accel/gae/seconds"] > 0
        assert "rl_accel/gae/seconds_saved" in metrics
        assert metrics["rl_accel/sampler/polls"] >= 1
    assert not [key for metrics in steps("stock") for key in metrics if key.startswith("rl_accel/")]


def test_the_task_is_what_verl_reads_and_is_made_only_once(repo, out, clean_environment):
    task = out / "task"
    written = (task / "model" / "model.safetensors").stat().st_mtime_ns
    command = [sys.executable, str(repo / "examples" / "verl_ppo_cpu" / "prepare.py"), str(task)]
    again = subprocess.run(command, check=True, capture_output=True, text=True, env=clean_environment, timeout=120)
    assert "up to date" in again.stdout
    assert (task / "model" / "model.safetensors").stat().st_mtime_ns == written

    tokenizer = transformers.AutoTokenizer.from_pretrained(task / "model")
    rows = pandas.read_parquet(task / "train.parquet").to_dict("records")
    lengths = set()
    for row in rows[:200]:
        text = row["prompt"][0]["content"]
        assert text.startswith(row["reward_model"]["ground_truth"])
        ids = tokenizer.apply_chat_template(list(row["prompt"]), add_generation_prompt=True, return_dict=False)
        assert tokenizer.unk_token_id not in ids
        lengths.add(len(ids))
    assert max(lengths) <= 16  # data.max_prompt_length of the recipe
    assert {row["reward_model"]["ground_truth"] for row in rows} == {"digits", "letters"}
    assert tokenizer.decode(tokenizer.encode("4 tea"), skip_special_tokens=True) == "4 tea"
