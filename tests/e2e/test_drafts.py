"""Drafts on real vLLM under verl: two replicas, tail batching with its aborts, weight updates, prompts that come again."""

import pickle

import numpy as np
import pytest

from rl_accel.drafts.index import SOURCES

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.vllm,
    pytest.mark.timeout(1500),
    pytest.mark.parametrize("engine", ["vllm"], indirect=True, scope="module"),
]


OVERRIDES = (
    "algorithm.adv_estimator=grpo",
    "trainer.n_gpus_per_node=2",
    "data.train_batch_size=8",
    "data.train_max_samples=16",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "+rl_accel.drafts.enable=True",
    "+rl_accel.drafts.save=True",
    "+rl_accel.final_output.enable=True",
)


def test_drafted_responses_have_the_probabilities_of_the_trainer_and_a_checkpoint_has_the_history(tail_run):
    folders = []

    def run(name, steps, *overrides):
        return tail_run(
            name,
            steps,
            [],
            lambda index: "single_turn_agent",
            *OVERRIDES,
            *overrides,
            follow=lambda metrics, _: folders.append(metrics.parent),
        )

    left = run("drafts", 4, "trainer.save_freq=3")
    left.assert_sound(4, 8)  # probabilities among it
    numbers = [
        {name.removeprefix("rl_accel/drafts/"): value for name, value in step.items() if "rl_accel/drafts/" in name}
        for step in left.steps.values()
    ]
    told = [step for step in numbers if step.get("drafted")]
    assert told, "an exchange is over before the next step is"
    for step in told:
        assert step["drafted"] == sum(step.get(f"drafted_{source}", 0) for source in SOURCES)
        assert step["accepted"] <= step["drafted"]  # the model writes random characters: few are right
        assert step["tokens_a_step"] >= 1

    checkpoint = folders[0] / "checkpoints" / "global_step_3"
    history = pickle.loads((checkpoint / "drafts.pkl").read_bytes())
    assert len(history) >= 3 * 8 * 4
    lengths = [(np.frombuffer(response, np.int32)[1], len(response) // 4 - 2) for response in history]
    assert all(0 < prompt < tokens for prompt, tokens in lengths)
    resumed = run("resumed", 4, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    assert list(resumed.steps) == [4]
    assert f"{len(history)} earlier responses from {checkpoint}" in resumed.log
