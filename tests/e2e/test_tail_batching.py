"""Tail batching on the real trainer: short and long rounds, exact batches, then kill -9 and a resume with an exact ledger."""

import contextlib
import json
import signal
from dataclasses import dataclass, field

import psutil
import pytest

from rl_accel.lab.ab.runner import Stop, last_lines, supervised

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1500),
    pytest.mark.vllm,
    pytest.mark.parametrize("engine", ["any"], indirect=True, scope="module"),
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
    "data.val_max_samples=4",
    "+rl_accel.tail_batching.enable=True",
    "+rl_accel.tail_batching.prompt_ratio=1.25",
    "+rl_accel.tail_batching.queue_threshold=4",
)


@dataclass
class Left:
    """What the two runs left: logs, metrics by step and the ledger, as of the kill and as of the end."""

    logs: list[str] = field(default_factory=list)
    steps: list[dict[int, dict[str, float]]] = field(default_factory=list)
    ledgers: list[list[dict]] = field(default_factory=list)

    @property
    def all_steps(self):
        return [metrics for run in self.steps for metrics in run.values()]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kill_trainer(metrics):
    """SIGKILL to the trainer process of the run that logs to ``metrics``, and to no other."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            ours = process.environ().get("VERL_FILE_LOGGER_PATH") == str(metrics)
            if ours and "TaskRunnerV1" in " ".join(process.cmdline()):
                process.send_signal(signal.SIGKILL)


@pytest.fixture(scope="module")
def left(recipe_command, tmp_path_factory):
    """Train, kill -9 the trainer in the middle of a step after the checkpoint, run the same command again."""
    out = tmp_path_factory.mktemp("tail")
    planned, environment = recipe_command(STEPS)
    command = [*planned, *OVERRIDES, f"trainer.default_local_dir={out / 'checkpoints'}"]
    ledger, left, killed = out / "checkpoints" / "tail_batching" / "ledger.jsonl", Left(), []

    for name in ("killed", "resumed"):
        metrics, log = out / f"{name}.jsonl", out / f"{name}.log"
        environment["VERL_FILE_LOGGER_PATH"] = str(metrics)

        def follow(metrics=metrics):
            if not killed and len(ledger.read_text().splitlines() if ledger.exists() else []) >= KILLED_IN:
                killed.append(metrics)
                kill_trainer(metrics)
            return False

        outcome = supervised(command, environment, out, log, Stop(), follow)
        assert (outcome.exit_code == 0) == (name == "resumed"), last_lines(log, 60)
        left.logs.append(log.read_text(errors="replace"))
        left.steps.append({row["step"]: row["data"] for row in read(metrics) if "training/global_step" in row["data"]})
        left.ledgers.append(read(ledger))
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
