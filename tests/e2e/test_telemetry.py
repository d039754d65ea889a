"""The stage clock on the real trainer, together with the two other features that stand on agent loops of ours."""

import json

import pytest

from rl_accel.telemetry import stage_clock
from rl_accel.telemetry.profile import read_run
from rl_accel.telemetry.stage_clock import read_kept

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

P0, R0, STEPS = 8, 4, 4
DRIVER = "from verl.trainer.main_ppo import main\nmain()\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("telemetry")


@pytest.fixture
def run(train, folder):
    """A run with short rounds and at least one long one; its metrics by step."""
    done = train(
        DRIVER,
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.rollout.n={R0}",
        f"data.train_batch_size={P0}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={P0}",
        "data.max_response_length=160",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        "trainer.test_freq=2",
        "data.val_max_samples=4",
        "+rl_accel.telemetry.enable=True",
        "+rl_accel.tail_batching.enable=True",
        "+rl_accel.tail_batching.queue_threshold=4",
        "+rl_accel.reward_timeout.enable=True",
        steps=STEPS,
    )
    return [metrics for metrics in done.steps if "timing_s/step" in metrics]


def test_every_response_is_noted_and_shares_add_up(run, folder):
    kept = read_kept(folder / "checkpoints" / "rl_accel_telemetry.jsonl")
    assert list(kept) == list(range(1, STEPS + 1))
    assert len(run) == STEPS
    for metrics, responses in zip(run, kept.values(), strict=True):
        ours = {
            name.removeprefix("rl_accel/telemetry/"): value for name, value in metrics.items() if "telemetry" in name
        }

        timed = [metrics[f"timing_s/{stage}"] for stage in stage_clock.STAGES if f"timing_s/{stage}" in metrics]
        assert sum(timed) >= 0.9 * metrics["timing_s/step"], "timers overlap with nothing and leave little out"
        shares = [value for name, value in ours.items() if name.startswith("share/")]
        assert sum(shares) == pytest.approx(1.0, abs=0.02)

        short = metrics["rl_accel/tail_batching/short_round"] == 1.0
        assert len(responses) == ours["responses"] == (10 * 5 if short else P0 * R0)
        # Of those that tail batching has no use for, some end by themselves before they are stopped.
        assert ours["cancelled"] <= metrics["rl_accel/tail_batching/responses_cancelled"]
        assert ours["responses"] - ours["cancelled"] >= P0 * R0
        assert ours["tokens"] == metrics["rl_accel/tail_batching/tokens_generated"]
        assert {response.server for response in responses if response.tokens} == {"hf_cpu_server_0"}
        assert 0 < ours["idle_share"] < 1
        assert ours["preemptions"] == 0.0
        parts = ("most", "waiting", "reward", "rest")
        assert sum(ours[f"{part}_seconds"] for part in parts) == pytest.approx(metrics["timing_s/gen"], rel=1e-6)
        assert all(r.began <= r.generated <= r.rewarded <= r.ended for r in responses if r.outcome == "completed")
    assert {metrics["rl_accel/tail_batching/short_round"] for metrics in run} == {0.0, 1.0}
    # Reward processes tell once a second what they have counted: the last of a step may show in the next, of the last step in none.
    executions = [metrics["rl_accel/reward_timeout/executions"] for metrics in run]
    assert min(executions) > 0
    assert sum(executions) > (STEPS - 1) * P0 * R0

    log = folder / "metrics.jsonl"
    log.write_text("".join(json.dumps({"step": n, "data": m}) + "\n" for n, m in enumerate(run, 1)))
    found = read_run(folder)
    assert list(found.steps) == [3, 4]
    assert found.numbers["preemptions"] == 0.0
    assert len(found.last) == len(kept[4])
    assert not found.missing
