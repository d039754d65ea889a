"""Tests hanging graders in the real trainer: they are stopped early, and training survives kill -9 of all reward processes."""

import json
from types import SimpleNamespace

import pandas as pd
import pytest

STEPS, PROMPTS, RESPONSES, VALIDATED = 8, 8, 4, 4
FULL = 6.0
REWARD = """
import sys, time, zlib

KINDS = {"digits": set("0123456789"), "letters": set("abcdefghijklmnopqrstuvwxyz")}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert not any("rl_accel" in key for key in extra_info), extra_info
    if zlib.crc32(solution_str.encode()) % 8 == 0:
        time.sleep(600)
    time.sleep(0.05)
    right = sum(character in KINDS[ground_truth] for character in solution_str)
    share = right / max(len(solution_str), 1)
    return {"score": share, "acc": share > 0.1, "length": len(solution_str)}
"""
VICTIMS = {2: "ray::AnchorStore", 3: "rl_accel/reward/grader_process", 5: "ray::RewardLoopWorker"}
"""What is killed once so many steps are logged, by its command line."""


@pytest.fixture(scope="module")
def left(launch, workspace, read_metrics, kill_first, tmp_path_factory):
    """What the run left, what was killed, and the file of anchors."""
    out, killed = tmp_path_factory.mktemp("reward"), {}
    (out / "reward.py").write_text(REWARD)
    pd.read_parquet(workspace / "task" / "train.parquet").head(PROMPTS).to_parquet(out / "train.parquet")
    overrides = [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        "data.max_response_length=64",
        f"data.train_files={out / 'train.parquet'}",
        f"data.val_max_samples={VALIDATED}",
        "trainer.total_epochs=100",
        "trainer.test_freq=4",
        "reward.num_workers=2",
        f"reward.custom_reward_function.path={out / 'reward.py'}",
        "+rl_accel.reward_timeout.enable=True",
        f"+rl_accel.reward_timeout.maximum={FULL}",
        "+rl_accel.reward_timeout.minimum=0.5",
        "+rl_accel.reward_timeout.min_correct=2",
        "+rl_accel.reward_timeout.timeout_score=-0.5",
        "+rl_accel.reward_timeout.workers=4",
    ]

    def follow(metrics):
        settled = len(read_metrics(metrics))
        for step, name in VICTIMS.items():
            if settled >= step and name not in killed:
                killed[name] = kill_first(name, metrics)

    run = launch(out, STEPS, (PROMPTS, RESPONSES), *overrides, follow=follow)
    anchors = json.loads((out / "checkpoints" / "rl_accel_reward_anchors.json").read_text())["anchors"]

    def numbers(name):
        return run.numbers("reward_timeout/" + name)

    return SimpleNamespace(log=run.log, steps=run.steps, numbers=numbers, anchors=anchors, killed=killed)


def test_training_goes_on_whatever_is_killed(left):
    assert left.killed.keys() == set(VICTIMS.values())
    assert min(left.killed.values()) >= 1
    assert list(left.steps) == list(range(1, STEPS + 1))
    assert "Error in _run_prompt" not in left.log, "no response failed"
    for metrics in left.steps.values():
        assert 0 < metrics["actor/grad_norm"] < 1e4
        assert metrics["perf/total_num_tokens"] == pytest.approx(
            PROMPTS * RESPONSES * (metrics["response_length/mean"] + metrics["prompt_length/mean"])
        )


def test_the_metrics_say_what_happened(left):
    assert set(left.numbers("applied")) == {1.0}
    assert sum(left.numbers("store_unreachable")) >= 1
    assert sum(left.numbers("reward_workers_lost")) == 1
    assert sum(left.numbers("workers_replaced")) >= 1
    assert sum(left.numbers("errors")) == 0


def test_answers_that_hang_are_stopped_early_and_get_their_score(left):
    counted = sum(
        left.numbers("executions")
    )  # those of the killed processes' last second are lost, those of the end come late
    assert 0.7 * STEPS * PROMPTS * RESPONSES <= counted <= 1.1 * STEPS * PROMPTS * RESPONSES
    timeouts = sum(left.numbers("timeouts"))
    assert 0.04 * counted < timeouts < 0.4 * counted
    assert sum(left.numbers("saved_seconds")) > 0.5 * FULL * timeouts
    assert min(metrics["critic/score/min"] for metrics in left.steps.values()) == -0.5
    assert max(metrics["critic/score/mean"] for metrics in left.steps.values()) < 1.0


def test_a_validation_teaches_nothing_and_is_told_apart(left):
    counted = sum(left.numbers("eval_executions"))  # the last ones may come after the last step was logged
    assert VALIDATED <= counted <= 2 * VALIDATED
    assert any("val-core" in name and "acc" in name for metrics in left.steps.values() for name in metrics)
    assert any("/length/mean" in name for name in left.steps[STEPS]), "the same keys of all samples"


def test_anchors_are_saved_beside_the_checkpoints(left):
    assert set(left.numbers("anchors")) == {float(PROMPTS)}
    assert len(left.anchors) == PROMPTS
    assert all(0.05 <= wall <= FULL and correct >= 2 for wall, _, correct in left.anchors.values())
