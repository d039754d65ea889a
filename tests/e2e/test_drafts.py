"""Tests drafts on real vLLM under verl: two replicas, tail batching with aborts, weight updates, and repeated prompts.

There are fewer slots than responses. In make test, test_drafts_vllm.py tests drafts on real vLLM without verl.
"""

import numpy as np
import pytest
import torch

from rl_accel.drafts.index import SOURCES

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.full,
    pytest.mark.parametrize("engine", ["vllm"], indirect=True, scope="module"),
]


OVERRIDES = (
    "algorithm.adv_estimator=grpo",
    "trainer.n_gpus_per_node=2",
    "data.train_max_samples=16",
    "+rl_accel.drafts.enable=True",
    "+rl_accel.drafts.save=True",
    "+rl_accel.final_output.enable=True",
    "actor_rollout_ref.rollout.max_num_seqs=8",
    "trainer.save_freq=3",
)


def test_drafted_responses_have_the_probabilities_of_the_trainer_and_a_checkpoint_has_the_history(tail_run):
    """The run finds two responses beside its last checkpoint, as one that is resumed would. It is not resumed really, which takes
    as long again; tests/integrations/verl/test_drafts.py has the ways to resume."""
    earlier = [np.array([0, 3, 5, 6, 7, *range(8, 8 + count)], np.int32).tobytes() for count in (4, 9)]
    checkpoints = []

    def leave_history(metrics):
        if not checkpoints:
            checkpoints.append(metrics.parent / "checkpoints")
            (checkpoints[0] / "global_step_0").mkdir(parents=True)
            torch.save(earlier, checkpoints[0] / "global_step_0" / "drafts.pt")

    ran = tail_run("drafts", 3, (8, 4), *OVERRIDES, follow=leave_history)
    ran.assert_sound(3, 8)  # probabilities among it
    numbers = [
        {name.removeprefix("rl_accel/drafts/"): value for name, value in step.items() if "rl_accel/drafts/" in name}
        for step in ran.steps.values()
    ]
    told = [step for step in numbers if step.get("drafted")]
    assert told, "an exchange is over before the next step is"
    for step in told:
        assert step["drafted"] == sum(step.get(f"drafted_{source}", 0) for source in SOURCES)
        assert step["accepted"] <= step["drafted"]  # the model writes random characters: few are right
        assert step["tokens_a_step"] >= 1
    assert f"2 earlier responses from {checkpoints[0] / 'global_step_0'}" in ran.log
    history = torch.load(checkpoints[0] / "global_step_3" / "drafts.pt", weights_only=True)
    assert history[:2] == earlier
    assert len(history) >= 2 + 3 * 8 * 4
    lengths = [(np.frombuffer(response, np.int32)[1], len(response) // 4 - 2) for response in history]
    assert all(0 < prompt < tokens for prompt, tokens in lengths)
