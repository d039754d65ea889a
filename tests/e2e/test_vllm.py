"""Real vLLM: the lossless features change no number of training; preemptions are vLLM's own; what cannot work is one line."""

import re
import subprocess
from fnmatch import fnmatch

import httpx
import pytest

from rl_accel.lab.ab.recipe import NOT_COMPARED
from rl_accel.telemetry.stage_clock import FILE_NAME, read_kept

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.vllm,
    pytest.mark.timeout(1500),
    pytest.mark.parametrize("engine", ["vllm"], indirect=True, scope="module"),
]

DRIVER = "from verl.trainer.main_ppo import main\nmain()\n"
BYTES_A_TOKEN = 2 * 2 * 2 * 32 * 4
"""Layers, keys and values, heads, their dimension, bytes of a float."""
NOT_EQUAL = ("rollout_corr/*", "training/rollout_*")
"""vLLM's log-probabilities differ in the seventh digit with the requests that share a batch, and with them what measures them."""


def test_lossless_features_change_no_number_of_training(train, tmp_path):
    stock = train(DRIVER, folder=tmp_path / "stock").steps
    flags = ("+rl_accel.auto=True", "+rl_accel.telemetry.enable=True")
    ours = train(DRIVER, *flags, folder=tmp_path / "auto").steps
    assert len(stock) == len(ours) == 2
    for before, after in zip(stock, ours, strict=True):
        compared = [n for n in before if not any(fnmatch(n, pattern) for pattern in (*NOT_COMPARED, *NOT_EQUAL))]
        assert len(compared) > 60
        assert {name: after.get(name) for name in compared} == {name: before[name] for name in compared}
        assert after["rl_accel/gae/applied"] == after["rl_accel/sampler/applied"] == 1.0
        assert after["rl_accel/final_output/applied"] == after["rl_accel/telemetry/applied"] == 1.0
        assert after["training/rollout_probs_diff_max"] < 1e-5


def test_preemptions_are_those_that_vllm_counts(tail_run):
    """200 tokens of memory for each of five responses that may need 176: some are preempted in every round."""
    seen = {}

    def follow(metrics, steps):
        responses = metrics.parent / "checkpoints" / FILE_NAME
        kept = read_kept(responses) if responses.exists() else {}
        servers = {response.server for step in kept.values() for response in step if response.server}
        if len(kept) == steps > len(seen) and steps < 4:  # later the servers may be gone; the next round may have begun
            (text,) = [httpx.get(f"http://{server}/metrics", timeout=60).text for server in servers]
            seen[steps] = counter(text, "num_preemptions_total")

    left = tail_run(
        "preempted",
        4,
        [],
        lambda index: "single_turn_agent",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=8",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.max_model_len=176",
        f"actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes={1000 * BYTES_A_TOKEN}",
        "actor_rollout_ref.rollout.disable_log_stats=False",
        "+rl_accel.telemetry.enable=True",
        follow=follow,
    )
    left.assert_sound(4, 8)
    told = [metrics["rl_accel/telemetry/preemptions"] for metrics in left.steps.values()]
    assert sum(told) > 0
    assert len(seen) >= 2
    for steps, counted in seen.items():
        assert sum(told[:steps]) <= counted <= sum(told[: steps + 1]), (steps, seen, told)


def counter(text, name):
    return sum(float(value) for value in re.findall(rf"^vllm:{name}\{{.*\}} (\S+)$", text, re.MULTILINE))


def test_what_cannot_work_is_said_before_ray_starts(recipe_command, tmp_path):
    rollout = "actor_rollout_ref.rollout"
    command, environment = recipe_command(1)
    done = subprocess.run(
        [
            *command,
            f"{rollout}.dtype=bfloat16",
            f"{rollout}.enable_sleep_mode=True",
            f"{rollout}.max_model_len=4096",
            f"{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes=100000",
        ],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode != 0
    for override in (
        f"{rollout}.dtype=float32",
        f"+{rollout}.enable_sleep_mode=False",
        f"{rollout}.max_model_len=2048",
        f"+{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes={4096 * BYTES_A_TOKEN}",
    ):
        assert override in done.stderr
    assert "Started a local Ray instance" not in done.stdout + done.stderr
