"""Tail batching on the real trainer: short and long rounds, exact batches, then kill -9 and a resume with an exact ledger."""

import re
from dataclasses import dataclass, field

import httpx
import pytest

from rl_accel.lab.ab.runner import Stop, last_lines, ray_temp_dir, supervised
from rl_accel.telemetry.stage_clock import FILE_NAME, read_kept

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1500),
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

P0, R0, STEPS, SAVED_AT, KILLED_IN = 8, 4, 7, 4, 5
OVERRIDES = (
    "algorithm.adv_estimator=grpo",
    f"actor_rollout_ref.rollout.n={R0}",
    f"data.train_batch_size={P0}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={P0}",
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


@dataclass
class Left:
    """Logs, metrics by step and ledgers of the two runs; vLLM's own count of preemptions by step of the first run."""

    logs: list[str] = field(default_factory=list)
    steps: list[dict[int, dict[str, float]]] = field(default_factory=list)
    ledgers: list[list[dict]] = field(default_factory=list)
    preempted: dict[int, float] = field(default_factory=dict)

    @property
    def all_steps(self):
        return [metrics for run in self.steps for metrics in run.values()]


def preemptions_told_by_vllm(checkpoints, steps):
    """The engine's counter after ``steps`` steps; None if the responses of another step are the last on record."""
    kept = read_kept(checkpoints / FILE_NAME) if (checkpoints / FILE_NAME).exists() else {}
    servers = {response.server for responses in kept.values() for response in responses if response.server}
    if not steps or len(kept) != steps:
        return None
    (text,) = [httpx.get(f"http://{server}/metrics", timeout=60).text for server in servers]
    return sum(float(n) for n in re.findall(r"^vllm:num_preemptions_total\{.*\} (\S+)$", text, re.MULTILINE))


@pytest.fixture(scope="module")
def left(recipe_command, engine, kill_first, read_lines, read_metrics, tmp_path_factory):
    """Train, kill -9 the trainer in the middle of a step after the checkpoint, run the same command again."""
    out = tmp_path_factory.mktemp("tail")
    planned, environment = recipe_command(STEPS)
    checkpoints = out / "checkpoints"
    command = [*planned, *OVERRIDES, *LITTLE_MEMORY[engine.name], f"trainer.default_local_dir={checkpoints}"]
    ledger, left, killed = checkpoints / "tail_batching" / "ledger.jsonl", Left(), []

    for name in ("killed", "resumed"):
        metrics, log = out / f"{name}.jsonl", out / f"{name}.log"

        def follow(name=name, metrics=metrics):
            steps = len(read_lines(ledger))
            if name == "killed" and steps < KILLED_IN - 1 and engine.name == "vllm" and steps not in left.preempted:
                counted = preemptions_told_by_vllm(checkpoints, steps)
                left.preempted |= {} if counted is None else {steps: counted}
            if not killed and steps >= KILLED_IN:
                killed.append(kill_first("TaskRunnerV1", metrics))
            return False

        with ray_temp_dir() as ray_dir:
            environment |= {"VERL_FILE_LOGGER_PATH": str(metrics), "RAY_TMPDIR": str(ray_dir)}
            outcome = supervised(command, environment, out, log, Stop(), follow, ray_dir)
        assert (outcome.exit_code == 0) == (name == "resumed"), last_lines(log, 60)
        left.logs.append(log.read_text(errors="replace"))
        left.steps.append(read_metrics(metrics))
        left.ledgers.append(read_lines(ledger))
    return left


def numbers(metrics):
    prefix = "rl_accel/tail_batching/"
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


def test_short_and_long_rounds_occur_and_every_batch_is_exact(left):
    found = [numbers(metrics) for metrics in left.all_steps]
    assert sum(item["short_round"] for item in found) >= 2
    assert sum(item["long_round"] for item in found) >= 1
    assert all(item["prompts_trained"] == P0 and item["applied"] == 1.0 for item in found)
    for item in found:
        assert (item["responses_cancelled"] > 0) == (item["short_round"] == 1.0), item
        assert item["ghost_keys"] == item["prompts_failed"] == 0.0
    for metrics in left.all_steps:  # every response of the batch, and no other, was trained on
        assert metrics["perf/total_num_tokens"] == pytest.approx(
            P0 * R0 * (metrics["response_length/mean"] + metrics["prompt_length/mean"])
        )


def test_training_is_on_policy_and_sound(left):
    for log in left.logs:
        assert "dtype mismatch" not in log
        assert "could not be cleared" not in log
    for metrics in left.all_steps:
        assert metrics["training/rollout_probs_diff_max"] < 1e-4
        assert metrics["training/off_policy/trajectory_staleness/max"] == 0
        assert metrics["training/off_policy/trajectory_spans/max"] == 1
        assert 0 < metrics["actor/grad_norm"] < 1e4


def test_validation_runs_in_between(left):
    validated = [
        step for run in left.steps for step, metrics in run.items() if any(k.startswith("val-") for k in metrics)
    ]
    assert set(validated) >= {3, 6, STEPS}


def test_the_ledger_is_exact_across_kill_and_resume(left):
    killed, resumed = left.ledgers
    assert [row["step"] for row in killed] == list(range(1, KILLED_IN + 1))
    assert [row["step"] for row in resumed] == list(range(1, STEPS + 1))
    assert resumed[:SAVED_AT] == killed[:SAVED_AT], "what the checkpoint holds stays"
    assert min(left.steps[1]) == SAVED_AT + 1
    trained = [prompt_id for row in resumed for prompt_id in row["trained"]]
    assert len(trained) == len(set(trained)) == P0 * STEPS
    # No more prompts were begun than this run could train, so none of those that were is missing.
    assert set(trained) == {f"1:{row}" for row in range(1, P0 * STEPS + 1)}


def test_deferred_prompts_and_the_position_in_the_data_come_back(left):
    killed, _ = left.ledgers
    assert numbers(left.steps[0][SAVED_AT])["queue_length"] > 0, "else the checkpoint proves little"
    rows = [
        {prompt_id: index for row in ledger for prompt_id, index in row["trained"].items()} for ledger in left.ledgers
    ]
    assert len(set(rows[1].values())) == P0 * STEPS, "no row of the data set twice"
    again = {prompt_id for row in killed[SAVED_AT:] for prompt_id in row["trained"]} & rows[1].keys()
    assert len(again) >= P0 // 2
    assert {i: rows[0][i] for i in again} == {i: rows[1][i] for i in again}, "an id stands for the same row as before"


def test_preemptions_in_the_log_are_those_that_vllm_counts(left, engine):
    if engine.name != "vllm":
        pytest.skip("only vLLM counts preemptions")
    logged = [metrics["rl_accel/telemetry/preemptions"] for metrics in left.steps[0].values()]
    assert sum(logged) > 0
    assert len(left.preempted) >= 2
    for steps, counted in left.preempted.items():  # the next round may have begun
        assert sum(logged[:steps]) <= counted <= sum(logged[: steps + 1]), (left.preempted, logged)
