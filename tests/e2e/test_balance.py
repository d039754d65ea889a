"""Balanced rollouts in a real training: what is trained on is what stock trains on, wherever responses were generated.

And with telemetry, which changes no metric either.
"""

import json
import re

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

DRIVER = "from verl.trainer.main_ppo import main\nmain()\n"
OVERRIDES = (
    "algorithm.adv_estimator=grpo",
    "trainer.n_gpus_per_node=2",
    "data.train_batch_size=8",
    "data.max_response_length=160",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.max_num_seqs=6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.rollout.agent.num_workers=2",
    "+actor_rollout_ref.rollout.engine_kwargs.hf_cpu.seconds_per_step=0.03",  # long enough to see that one replica is emptier
)
OTHER = ("timing", "perf/", "rl_accel", "rollout_corr", "training/rollout_", "agent_loop")
"""In names of what is no matter of training, or of the log-probabilities of an engine: those of a prefix read again are rounded."""


def test_training_is_bit_for_bit_that_of_stock_while_responses_move(train, tmp_path):
    stock = train(DRIVER, *OVERRIDES, steps=3, folder=tmp_path / "stock")
    flags = ("+rl_accel.balance.enable=True", "+rl_accel.balance.margin=0.0", "+rl_accel.telemetry.enable=True")
    balanced = train(DRIVER, *OVERRIDES, *flags, steps=3, folder=tmp_path / "balanced")
    assert len(stock.steps) == len(balanced.steps) == 3
    for one, other in zip(stock.steps, balanced.steps, strict=True):
        compared = [name for name in one if not any(word in name for word in OTHER)]
        assert "actor/pg_loss" in compared
        assert {name: other[name] for name in compared} == {name: one[name] for name in compared}
        assert other["training/rollout_probs_diff_max"] < 1e-4
        assert other["rl_accel/balance/queue_wait_s"] > 0
        assert 0 < other["rl_accel/balance/places_in_use"] <= 1
        assert other["rl_accel/telemetry/responses"] == 32
    assert sum(step["rl_accel/balance/moves"] for step in balanced.steps) > 0


@pytest.mark.vllm
@pytest.mark.parametrize("engine", ["vllm"], indirect=True, scope="module")
def test_responses_that_vllm_went_on_with_elsewhere(train, tmp_path):
    """Greedy ones of a validation are those of stock. Sampled ones have the probabilities of the trainer: a token that is missing,
    twice, or drawn after another prefix would have another there."""
    overrides = (
        *OVERRIDES[:-1],
        "data.max_response_length=800",
        "actor_rollout_ref.rollout.n=8",  # so many wait that some are put off in every step
        "actor_rollout_ref.rollout.max_num_seqs=4",
        "trainer.val_before_train=True",
        "+rl_accel.final_output.enable=True",
    )
    validated = tmp_path / "stock", tmp_path / "balanced"
    train(
        DRIVER,
        *overrides,
        "trainer.val_only=True",
        f"trainer.validation_data_dir={validated[0]}",
        folder=tmp_path / "s",
    )
    run = train(
        DRIVER,
        *overrides,
        f"trainer.validation_data_dir={validated[1]}",
        "+rl_accel.balance.enable=True",
        "+rl_accel.balance.margin=0.0",
        "+rl_accel.balance.max_moves=9",
        VERL_USE_EXTERNAL_MODULES="rl_accel_status_probe,seeds_may_move",
    )
    stock, balanced = (
        {row["input"]: row["output"] for row in map(json.loads, (folder / "0.jsonl").read_text().splitlines())}
        for folder in validated
    )
    assert balanced == stock
    assert len(stock) > 8
    assert max(map(len, stock.values())) > 200
    assert re.search("stopped [0-9a-f]{32}", run.log), "of the greedy ones few move, in some runs none"
    assert len(run.steps) == 2
    assert sum(step["rl_accel/balance/moves"] for step in run.steps) > 0
    for step in run.steps:
        assert step["training/rollout_probs_diff_max"] < 1e-4
        assert step["response_length/mean"] > 50
