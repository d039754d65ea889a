"""Runs two real trainers on one Ray cluster, with features that use resources that jobs share."""

import subprocess

import pytest

pytestmark = [pytest.mark.full]

STEPS, PROMPTS = 10, 8
OVERRIDES = (
    "algorithm.adv_estimator=grpo",
    "data.max_response_length=64",
    "ray_kwargs.ray_init.num_cpus=null",
    "ray_kwargs.ray_init.num_gpus=null",
    "ray_kwargs.ray_init.object_store_memory=null",
    "+rl_accel.tail_batching.enable=True",
    "+rl_accel.telemetry.enable=True",
    "+rl_accel.reward_timeout.enable=True",
)
DRIVER = """
import runpy, sys
import ray
address, namespace, metrics = sys.argv[1:4]
del sys.argv[1:4]
variables = {"VERL_FILE_LOGGER_PATH": metrics}
ray.init(address=address, namespace=namespace, runtime_env={"env_vars": variables})
runpy.run_module("verl.trainer.main_ppo", run_name="__main__", alter_sys=True)
"""


def test_each_job_trains_its_own_prompts_or_is_refused(start_ray, recipe_command, read_lines, read_metrics, tmp_path):
    """Both begin at once, so that they train at the same time. verl's reward workers have fixed names: each job has a namespace."""
    command, environment = recipe_command(STEPS, (PROMPTS, 4))
    platform = {key: value for key, value in environment.items() if key.startswith("VERL_")}
    address = start_ray(num_cpus=32, num_gpus=2, **platform, VERL_ENGINE_DEVICE="cuda", OMP_NUM_THREADS="1")
    (tmp_path / "driver.py").write_text(DRIVER)
    first = next(index for index, word in enumerate(command) if "=" in word)
    jobs = {}

    def begin(name):
        out = tmp_path / name
        out.mkdir()
        driver = [command[0], str(tmp_path / "driver.py"), address, name, str(out / "metrics.jsonl")]
        words = [*driver, *command[first:], *OVERRIDES, f"trainer.default_local_dir={out / 'checkpoints'}"]
        with (out / "train.log").open("w") as log:
            jobs[name] = subprocess.Popen(words, cwd=out, env=environment, stdout=log, stderr=subprocess.STDOUT)

    try:
        begin("one")
        begin("two")
        codes = {name: job.wait() for name, job in jobs.items()}
    finally:
        for job in jobs.values():
            job.kill()
    for name, code in codes.items():
        log = (tmp_path / name / "train.log").read_text(errors="replace")
        if code and not all(codes.values()):
            assert "another job of this Ray cluster" in log, log[-4000:]
            continue
        assert code == 0, log[-4000:]
        steps = read_metrics(tmp_path / name / "metrics.jsonl")
        assert list(steps) == list(range(1, STEPS + 1))
        ledger = read_lines(tmp_path / name / "checkpoints/tail_batching/ledger.jsonl")
        settled = [row for line in ledger for row in line["trained"]]
        assert len(settled) == len(set(settled)) == STEPS * PROMPTS
        for metrics in steps.values():
            assert metrics["training/rollout_probs_diff_max"] < 1e-4
            assert metrics["rl_accel/tail_batching/ghost_keys"] == 0
            assert metrics["rl_accel/telemetry/responses"] > 0
        graded = sum(metrics.get("rl_accel/reward_timeout/executions", 0) for metrics in steps.values())
        launched = sum(metrics["rl_accel/telemetry/responses"] for metrics in steps.values())
        assert 0 < graded <= launched, "counts of the other job are not in it"
