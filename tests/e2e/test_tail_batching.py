"""Tests tail batching in the real trainer: short and long rounds, exact batches, kill -9, and a resume with an exact ledger."""

import re
from types import SimpleNamespace

import httpx
import pytest

from rl_accel.telemetry.stage_clock import FILE_NAME, read_kept

pytestmark = [
    pytest.mark.parametrize(
        "engine",
        [
            "hf_cpu",
            pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.full]),
            pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.full]),
        ],
        indirect=True,
        scope="module",
    ),
]

P0, R0, STEPS, SAVED_AT, KILLED_IN = 8, 4, 8, 5, 6
OVERRIDES = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.agent.num_workers=2",
    f"trainer.save_freq={SAVED_AT}",
    "trainer.resume_mode=auto",
    "trainer.test_freq=3",
    "data.max_response_length=160",
    "data.val_max_samples=4",
    "+rl_accel.telemetry.enable=True",
    "+rl_accel.tail_batching.enable=True",
    "+rl_accel.tail_batching.prompt_ratio=1.25",
    "+rl_accel.tail_batching.queue_threshold=4",
    "+rl_accel.overlap_validation.enable=True",
)
BYTES_PER_TOKEN = 2 * 2 * 2 * 32 * 4
"""Layers, keys and values, heads, their dimension, bytes of a float."""
LITTLE_MEMORY = {
    "hf_cpu": (),
    "vllm": (
        "actor_rollout_ref.rollout.max_model_len=176",
        f"actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes={1000 * BYTES_PER_TOKEN}",
        "actor_rollout_ref.rollout.disable_log_stats=False",
    ),
    "sglang": (),
}
"""Overrides by engine. On vLLM, five responses of up to 176 tokens share 1,000: some are preempted in every round."""


def preemptions_told_by_vllm(checkpoints, steps):
    """The engine's counter after ``steps`` steps; None if the responses of another step are the last on record."""
    kept = read_kept(checkpoints / FILE_NAME) if (checkpoints / FILE_NAME).exists() else {}
    servers = {response.server for responses in kept.values() for response in responses if response.server}
    if not steps or len(kept) != steps:
        return None
    (text,) = [httpx.get(f"http://{server}/metrics", timeout=60).text for server in servers]
    return sum(float(n) for n in re.findall(r"^vllm:num_preemptions_total\{.*\} (\S+)$", text, re.MULTILINE))


@pytest.fixture(scope="module")
def left(launch, engine, kill_first, read_lines, tmp_path_factory):
    """Train, kill -9 the trainer in the middle of a step after the checkpoint, run the same command again.

    ``preempted`` is vLLM's own count of preemptions in the first run, by the steps that had ended before and after it was read.
    """
    out, preempted, killed = tmp_path_factory.mktemp("tail"), {}, []
    checkpoints = out / "checkpoints"
    ledger = checkpoints / "tail_batching" / "ledger.jsonl"

    def follow(metrics):
        steps = len(read_lines(ledger))
        if steps < KILLED_IN - 1 and engine.name == "vllm" and steps not in {before for before, _ in preempted}:
            counted = preemptions_told_by_vllm(checkpoints, steps)
            preempted.update({} if counted is None else {(steps, len(read_lines(ledger))): counted})
        if not killed and steps >= KILLED_IN:
            killed.append(kill_first("TaskRunnerV1", metrics))

    def run(name, **how):
        (out / name).mkdir()
        overrides = (*OVERRIDES, *LITTLE_MEMORY[engine.name])
        return launch(out / name, STEPS, (P0, R0), *overrides, checkpoints=checkpoints, **how)

    runs = [run("killed", follow=follow, completes=False), run("resumed")]
    return SimpleNamespace(runs=runs, preempted=preempted)


@pytest.fixture
def all_steps(left):
    return [metrics for run in left.runs for metrics in run.steps.values()]


def numbers(metrics):
    prefix = "rl_accel/tail_batching/"
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


def test_short_and_long_rounds_occur_and_every_batch_is_exact(all_steps):
    results = [numbers(metrics) for metrics in all_steps]
    assert sum(item["short_round"] for item in results) >= 2
    assert sum(item["long_round"] for item in results) >= 1
    assert all(item["prompts_trained"] == P0 and item["applied"] == 1.0 for item in results)
    for item in results:
        assert (item["responses_cancelled"] > 0) == (item["short_round"] == 1.0), item
        assert item["ghost_keys"] == item["prompts_failed"] == 0.0
    for metrics in all_steps:  # every response of the batch, and no other, was trained on
        assert metrics["perf/total_num_tokens"] == pytest.approx(
            P0 * R0 * (metrics["response_length/mean"] + metrics["prompt_length/mean"])
        )


def test_training_is_on_policy_and_validation_runs_in_between(left):
    for run in left.runs:
        run.assert_on_policy()
    assert {step for run in left.runs for step in run.validated} >= {3, 6, STEPS}


def test_the_round_that_begins_during_a_validation_is_a_long_one(left):
    for run in left.runs:
        early = [step for step, metrics in run.steps.items() if "rl_accel/overlap_validation/ahead_seconds" in metrics]
        assert early == [step + 1 for step in run.validated if step + 1 in run.steps]
        assert all(numbers(run.steps[step])["long_round"] == 1.0 for step in early)
    assert early, "the second run validates before its last step"


def test_the_ledger_is_exact_across_kill_and_resume(left):
    killed, resumed = (run.ledger for run in left.runs)
    assert [row["step"] for row in killed] == list(range(1, KILLED_IN + 1))
    assert [row["step"] for row in resumed] == list(range(1, STEPS + 1))
    assert resumed[:SAVED_AT] == killed[:SAVED_AT], "what the checkpoint holds stays"
    assert min(left.runs[1].steps) == SAVED_AT + 1
    trained = [prompt_id for row in resumed for prompt_id in row["trained"]]
    assert len(trained) == len(set(trained)) == P0 * STEPS
    # No more prompts were begun than this run could train, so none of those that were is missing.
    assert set(trained) == {f"1:{row}" for row in range(1, P0 * STEPS + 1)}


def test_deferred_prompts_and_the_position_in_the_data_come_back(left):
    killed = left.runs[0].ledger
    assert numbers(left.runs[0].steps[SAVED_AT])["queue_length"] > 0, "else the checkpoint proves little"
    rows = [run.settled("trained") for run in left.runs]
    assert len(set(rows[1].values())) == P0 * STEPS, "no row of the data set twice"
    again = {prompt_id for row in killed[SAVED_AT:] for prompt_id in row["trained"]} & rows[1].keys()
    assert len(again) >= P0 // 2
    assert {i: rows[0][i] for i in again} == {i: rows[1][i] for i in again}, "an id stands for the same row as before"


def test_preemptions_in_the_log_are_those_that_vllm_counts(left, engine):
    if engine.name != "vllm":
        pytest.skip("only vLLM counts preemptions")
    logged = left.runs[0].numbers("telemetry/preemptions")
    assert sum(logged) > 0
    assert len(left.preempted) >= 2
    for (before, after), counted in left.preempted.items():  # the next round may have begun
        assert sum(logged[:before]) <= counted <= sum(logged[: after + 1]), (left.preempted, logged)
