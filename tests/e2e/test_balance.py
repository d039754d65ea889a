"""Tests that balanced rollouts leave every number of a real training unchanged, whichever replica generates a response.

Telemetry is on as well, and changes no number either. test_drafts.py and test_vllm.py have balance on real vLLM.
"""

import pytest

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

OVERRIDES = (
    "algorithm.adv_estimator=grpo",
    "trainer.n_gpus_per_node=2",
    "data.max_response_length=160",
    "actor_rollout_ref.rollout.max_num_seqs=6",
    "actor_rollout_ref.rollout.agent.num_workers=2",
    "+actor_rollout_ref.rollout.engine_kwargs.hf_cpu.seconds_per_step=0.03",  # long enough to see that one replica is emptier
)
OTHER = ("timing", "perf/", "rl_accel", "rollout_corr", "training/rollout_", "agent_loop")
"""Parts of metric names that are not compared: times, and the log-probabilities of engines, which a migration rounds."""


def test_training_is_bit_for_bit_that_of_stock_while_responses_move(train, tmp_path):
    stock = train(*OVERRIDES, batch=(8, 4), folder=tmp_path / "stock")
    flags = ("+rl_accel.balance.enable=True", "+rl_accel.balance.margin=0.0", "+rl_accel.telemetry.enable=True")
    balanced = train(*OVERRIDES, *flags, batch=(8, 4), folder=tmp_path / "balanced")
    assert len(stock.steps) == len(balanced.steps) == 2
    for one, other in zip(stock.steps.values(), balanced.steps.values(), strict=True):
        compared = [name for name in one if not any(word in name for word in OTHER)]
        assert "actor/pg_loss" in compared
        assert {name: other[name] for name in compared} == {name: one[name] for name in compared}
        assert other["training/rollout_probs_diff_max"] < 1e-4
        assert other["rl_accel/balance/queue_wait_seconds"] > 0
        assert 0 < other["rl_accel/balance/slots_in_use"] <= 1
        assert other["rl_accel/telemetry/responses"] == 32
    assert sum(balanced.numbers("balance/moves")) > 0
