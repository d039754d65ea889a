"""Two replicas with critic, reference and KL, agent loops of several turns and validation in between, while servers are
killed: one generates, the other is idle because the trainer trains. Training goes on and loses no prompt."""

import re

import pytest

pytestmark = [
    pytest.mark.parametrize(
        "engine",
        ["hf_cpu", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.full])],
        indirect=True,
        scope="module",
    ),
]

P0, R0, STEPS, KILLS = 8, 2, 6, 21
SERVERS = {"hf_cpu": "hf_cpu_server_1", "vllm": "vllm_server_1_0"}
VICTIMS = {"hf_cpu": "CPURolloutServer", "vllm": "VLLM::EngineCore"}
"""By engine, the process that is killed; vLLM's server outlives its engine, and answers every request at once with an error."""


@pytest.fixture(scope="module")
def left(tail_run, engine):
    kills = {"name": "kills_server", "_target_": "tail_batching_loops.KillsServer", "folder": "{out}"}
    two_turns = {"name": "two_turns", "_target_": "tail_batching_loops.TwoTurns"}

    def agent_name(index):
        return "kills_server" if index == KILLS else ("tool_agent", "two_turns", "single_turn_agent")[index % 3]

    return tail_run(
        "killed",
        STEPS,
        (P0, R0),
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.use_kl_loss=True",
        f"critic.ppo_mini_batch_size={P0}",
        "trainer.test_freq=2",
        "+rl_accel.tail_batching.queue_threshold=3",
        loops=[two_turns, {**kills, "server": SERVERS[engine.name]}],
        agent_name=agent_name,
        env={
            "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu.plugin,kills_while_training",
            "KILLED_WHILE_TRAINING": VICTIMS[engine.name],
        },
    )


def test_training_goes_on_with_full_batches_equal_weights_and_validations(left):
    left.assert_sound(STEPS, P0)
    assert left.validated == [2, 4, 6]
    for metrics in left.steps.values():
        assert 0 < metrics["critic/grad_norm"] < 1e4
    assert left.steps[1]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert left.steps[STEPS]["actor/kl_loss"] > 0


def test_what_the_dead_server_generated_is_generated_again_and_it_is_started_again(left, engine):
    assert sum(left.numbers("tail_batching/responses_failed")) >= 2, "at least two were running on it"
    assert sum(left.numbers("tail_batching/prompts_failed")) == 0
    name = "hf_cpu_server_1" if engine.name == "hf_cpu" else r"\S+:\d+"
    assert re.search(f"rollout server {name} is dead, its requests go to the others", left.log)
    assert left.log.count("had died and was started again") == 2


def test_every_prompt_is_trained_once(left):
    trained = left.settled("trained")
    assert len(trained) == sum(len(line["trained"]) for line in left.ledger) == P0 * STEPS
    assert left.settled("rejected") == left.settled("failed") == {}
    assert {prompt_id: int(prompt_id.split(":")[1]) - 1 for prompt_id in trained} == trained
    assert KILLS in trained.values()


def test_agent_loops_of_several_turns_are_trained(left):
    names = set(left.data["agent_name"].iloc[list(left.settled("trained").values())])
    assert names == {"tool_agent", "two_turns", "single_turn_agent", "kills_server"}
    for step, metrics in left.steps.items():
        loops = left.data["agent_name"].iloc[list(left.ledger[step - 1]["trained"].values())]
        turns = loops.map(lambda name: 4 if name == "two_turns" else 2)
        assert metrics["num_turns/mean"] == pytest.approx(turns.mean())
