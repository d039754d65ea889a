"""Tests tail batching, reward timeout, telemetry and the lossless features on real SGLang, in one launch of the trainer."""

import json

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.parametrize("engine", ["sglang"], indirect=True, scope="module")]

P0, R0, STEPS = 4, 4, 5
REWARD = """
import time, zlib

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    if zlib.crc32(solution_str.encode()) % 8 == 0:
        time.sleep(600)
    wanted = str.isdigit if ground_truth == "digits" else str.isalpha
    return {"score": sum(map(wanted, solution_str)) / max(len(solution_str), 1)}
"""


@pytest.fixture(scope="module")
def counters(tmp_path_factory):
    return tmp_path_factory.mktemp("counters") / "loads.jsonl"


@pytest.fixture(scope="module")
def run(tail_run, counters):
    return tail_run(
        "sglang",
        STEPS,
        (P0, R0),
        "algorithm.adv_estimator=grpo",
        "+actor_rollout_ref.rollout.engine_kwargs.sglang.enable_metrics=True",
        "+rl_accel.auto=True",
        "+rl_accel.telemetry.enable=True",
        "+rl_accel.tail_batching.queue_threshold=2",
        "+rl_accel.reward_timeout.enable=True",
        "+rl_accel.reward_timeout.maximum=10",
        "+rl_accel.reward_timeout.minimum=3",
        "+rl_accel.reward_timeout.min_correct=2",
        reward=REWARD,
        env={
            "SGLANG_COUNTERS": str(counters),
            "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu.plugin,sglang_counters",
        },
    )


def test_batches_are_full_and_have_the_probabilities_of_the_trainer(run):
    run.assert_sound(STEPS, P0)
    assert max(metrics["training/rollout_probs_diff_max"] for metrics in run.steps.values()) < 1e-5
    assert {line["kind"] for line in run.ledger} >= {"short", "long"}


def test_every_prompt_begun_is_trained_once(run):
    trained = [prompt_id for line in run.ledger for prompt_id in line["trained"]]
    assert len(trained) == len(set(trained)) == P0 * STEPS
    assert not run.settled("failed")


def test_the_surplus_of_a_short_round_is_cut_off_and_counted(run):
    for line, metrics in zip(run.ledger, run.steps.values(), strict=True):
        cancelled = metrics["rl_accel/tail_batching/responses_cancelled"]
        assert (cancelled > 0) == (line["kind"] == "short")
        assert metrics["rl_accel/telemetry/cancelled"] <= cancelled
        assert metrics["rl_accel/telemetry/preemptions"] == 0.0
    assert sum(run.numbers("telemetry/cancelled")) > 0


def test_nothing_runs_on_a_server_between_rounds(run, counters):
    loads = [json.loads(line) for line in counters.read_text().splitlines()]
    assert loads == [[0]] * STEPS


def test_graders_that_hang_are_stopped(run):
    assert sum(run.numbers("reward_timeout/timeouts")) > 0
    assert sum(run.numbers("reward_timeout/executions")) >= P0 * R0 * STEPS
    assert sum(run.numbers("reward_timeout/errors")) == 0
