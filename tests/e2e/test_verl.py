"""Real verl V1 runs on a CPU: the flags reach every process, training is sound, and the numbers are in verl's own log."""

import json
import subprocess
import sys

import pytest

MAIN = """
import runpy, sys
runpy.run_module("verl.trainer.main_ppo", run_name="__main__", alter_sys=True)
"""
TRAINER, WORKER, AGENT, REWARD = "TaskRunnerV1", "WorkerDict", "AgentLoopWorker", "RewardLoopWorker"


def features(status: dict) -> dict[str, str]:
    return {feature["name"]: feature["requested"] for feature in status["features"]}


def states(status: dict, feature: str) -> set[str]:
    (found,) = [f for f in status["features"] if f["name"] == feature]
    return {patch["state"] for patch in found["patches"]}


def assert_reached_every_role(run) -> None:
    for role in (TRAINER, WORKER, AGENT, REWARD):
        statuses = run.status_in(role)
        assert statuses, f"no process of {role} reported; titles: {[found['title'] for found in run.statuses]}"
        for status in statuses:
            assert features(status)["gae"] == "by name", f"{role}: {status}"
            assert states(status, "gae") <= {"applied", "waiting"}, f"{role}: {status}"
    (trainer,) = run.status_in(TRAINER)
    assert states(trainer, "gae") == {"applied"}
    assert all(states(status, "gae") == {"applied"} for status in run.status_in(WORKER))


def assert_sound(run, steps: int, on_policy: int | None = None) -> None:
    """``on_policy`` is how many of the steps train only on samples of the newest weights; None means all."""
    assert len(run.steps) == steps
    assert "dtype mismatch" not in run.log
    for metrics in run.steps[:on_policy]:
        assert metrics["training/rollout_probs_diff_max"] < 1e-4
    for metrics in run.steps:
        assert 0 < metrics["actor/grad_norm"] < 1e4


@pytest.mark.e2e
def test_gae_enabled_in_a_script_and_ray_started_by_verl(train):
    run = train("import rl_accel\nrl_accel.enable(gae=True, sampler=True)\n" + MAIN)
    assert_sound(run, steps=2)
    assert_reached_every_role(run)
    for metrics in run.steps:
        assert metrics["rl_accel/gae/applied"] == metrics["rl_accel/sampler/applied"] == 1.0
        assert metrics["rl_accel/gae/kernel/numba"] == 1.0
        assert metrics["rl_accel/gae/seconds"] > 0
        assert "rl_accel/gae/seconds_saved" in metrics
        assert metrics["rl_accel/sampler/polls"] >= 1


GRPO = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=4",
    "data.train_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",  # one update a step: at the first the policy still is the reference
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.ref.fsdp_config.strategy=fsdp2",
    "actor_rollout_ref.ref.strategy=fsdp2",
)


@pytest.mark.e2e
def test_grpo_on_a_local_cluster_that_already_runs(train):
    driver = """
import ray, rl_accel
ray.init(address="local", num_cpus=16, num_gpus=1, include_dashboard=False, object_store_memory=10**9)
rl_accel.enable(gae=True, advantages=True, sampler=True)
"""
    run = train(driver + MAIN, *GRPO, "trainer.v1.trainer_mode=colocate_async")
    assert_sound(run, steps=2, on_policy=1)  # later steps of this mode go on with what older weights began
    assert_reached_every_role(run)
    assert run.steps[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    for metrics in run.steps:
        assert metrics["rl_accel/advantages/applied"] == 1.0
        assert metrics["rl_accel/sampler/polls"] >= 1


@pytest.mark.e2e
def test_grpo_on_a_cluster_started_before_any_driver(train, start_ray, probe_environment, tmp_path):
    far = tmp_path / "far"
    far.mkdir()
    cpu = {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "OMP_NUM_THREADS": "1"}
    own = {
        "VERL_FILE_LOGGER_PATH": str(tmp_path / "metrics.jsonl")
    }  # the trainer process has the environment of the cluster
    address = start_ray(num_cpus=16, num_gpus=1, **cpu, **own, **probe_environment(far))
    driver = "import rl_accel\nrl_accel.enable(gae=True, advantages=True)\n" + MAIN
    existing = ("~+ray_kwargs.ray_init", "ray_kwargs.ray_init.num_cpus=null", "ray_kwargs.ray_init.num_gpus=null")
    run = train(driver, *GRPO, *existing, f"+ray_kwargs.ray_init.address={address}")
    run.statuses += [json.loads(path.read_text()) for path in far.glob("*.json")]
    assert_sound(run, steps=2)
    assert_reached_every_role(run)
    assert all(metrics["rl_accel/advantages/applied"] == 1.0 for metrics in run.steps)


@pytest.mark.e2e
def test_a_misspelt_flag_stops_the_run_before_a_cluster_starts(tmp_path, clean_environment):
    done = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", "+rl_accel.gae.enabel=True"],
        cwd=tmp_path,
        env=clean_environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode != 0
    assert "unknown key rl_accel.gae.enabel (did you mean rl_accel.gae.enable?)" in done.stderr
    assert "Started a local Ray instance" not in done.stdout + done.stderr


@pytest.mark.e2e
def test_the_shipped_recipe_gives_identical_rewards(repo, tmp_path, clean_environment):
    out = tmp_path / "ab"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "rl_accel",
            "ab",
            "examples/verl_ppo_cpu/recipe.yaml",
            "--out",
            str(out),
            "--steps",
            "3",
        ],
        cwd=repo,
        env=clean_environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    summary = json.loads((out / "summary.json").read_text())
    assert {run["status"] for run in summary["runs"]} == {"done"}, done.stdout[-3000:]
    assert (out / "report.html").stat().st_size > 10_000
    checks = {check["name"]: check for check in summary["checks"]}
    assert checks["identical"]["status"] == "green", checks["identical"]
    assert checks["rollout_probs_diff"]["status"] == "green", checks["rollout_probs_diff"]
    assert checks["forbidden_log"]["status"] == "green", checks["forbidden_log"]
