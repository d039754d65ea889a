"""Tests real vLLM: lossless features change nothing, and impossible settings are refused in one line each."""

import json
import subprocess
from fnmatch import fnmatch

import pytest

from rl_accel.lab.ab.recipe import NOT_COMPARED

pytestmark = [pytest.mark.vllm, pytest.mark.parametrize("engine", ["vllm"], indirect=True, scope="module")]

BYTES_A_TOKEN = 2 * 2 * 2 * 32 * 4
"""Layers, keys and values, heads, their dimension, bytes of a float."""
NOT_EQUAL = ("rollout_corr/*", "training/rollout_*")
"""Metrics of vLLM's log-probabilities, which differ in the seventh digit with the requests that share a batch."""


@pytest.fixture(scope="module")
def arm(train, tmp_path_factory):
    """``arm(*overrides, **of_train)``: the run, and the greedy responses of its first validation by prompt."""

    def run(*overrides, **of_train):
        folder = tmp_path_factory.mktemp("arm")
        validated = ("trainer.val_before_train=True", f"trainer.validation_data_dir={folder / 'validations'}")
        done = train(*validated, *overrides, folder=folder, **of_train)
        rows = map(json.loads, (folder / "validations" / "0.jsonl").read_text().splitlines())
        return done, {row["input"]: row["output"] for row in rows}

    return run


@pytest.fixture(scope="module")
def stock(arm):
    return arm()


@pytest.fixture(scope="module")
def auto(arm):
    """Its flags come from the script."""
    return arm(begin="import rl_accel\nrl_accel.enable(auto=True, telemetry=True)\n")


@pytest.mark.full  # test_recipe.py shows it on the CPU engine
def test_lossless_features_change_no_number_of_training(stock, auto):
    assert len(stock[0].steps) == len(auto[0].steps) == 2
    for before, after in zip(stock[0].steps.values(), auto[0].steps.values(), strict=True):
        compared = [n for n in before if not any(fnmatch(n, pattern) for pattern in (*NOT_COMPARED, *NOT_EQUAL))]
        assert len(compared) > 60
        assert {name: after.get(name) for name in compared} == {name: before[name] for name in compared}
        assert after["rl_accel/gae/applied"] == after["rl_accel/telemetry/applied"] == 1.0
        assert after["training/rollout_probs_diff_max"] < 1e-5
    first, last = auto[0].steps.values()
    # The responses of the first step were generated beside the validation before it, so that often nobody waited for them.
    assert first["rl_accel/overlap_validation/applied"] == 1.0
    assert last["rl_accel/sampler/applied"] == 1.0


@pytest.mark.full
def test_greedy_responses_are_those_of_stock(stock, auto):
    assert auto[1] == stock[1]
    assert len(stock[1]) > 8
    assert max(map(len, stock[1].values())) > 200


def test_what_cannot_work_is_said_before_ray_starts(recipe_command, tmp_path):
    rollout = "actor_rollout_ref.rollout"
    command, environment = recipe_command(1)
    command += [
        f"{rollout}.dtype=bfloat16",
        f"{rollout}.enable_sleep_mode=True",
        f"{rollout}.max_model_len=4096",
        f"{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes=100000",
    ]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode != 0
    for override in (
        f"{rollout}.dtype=float32",
        f"+{rollout}.enable_sleep_mode=False",
        f"{rollout}.max_model_len=2048",
        f"+{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes={4096 * BYTES_A_TOKEN}",
    ):
        assert override in done.stderr
    assert "Started a local Ray instance" not in done.stdout + done.stderr
