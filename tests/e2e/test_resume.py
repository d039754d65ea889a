"""Resumes one run with and without features, on verl's own checkpoints: nothing is lost, or one log line says what."""

import fnmatch
import shutil

import pytest

from rl_accel.lab.ab.recipe import NOT_COMPARED

pytestmark = [pytest.mark.full, pytest.mark.timeout(2400)]

LOSSLESS = ("+rl_accel.auto=True", "+rl_accel.telemetry.enable=True", "+rl_accel.reward_timeout.enable=True")
TAIL = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=4",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "data.max_response_length=96",
)
"""Overrides of a run that tail batching can take part in; it leaves deferred prompts behind from its first step on."""


@pytest.fixture(scope="module")
def resumed(train, tmp_path_factory):
    """``resumed(checkpoints, steps, *overrides)``: go on from the folder's last checkpoint until ``steps``, and save each step."""
    folders = tmp_path_factory.mktemp("resume")

    def go_on(checkpoints, steps, *overrides):
        options = (f"trainer.default_local_dir={checkpoints}", "trainer.save_freq=1", "trainer.resume_mode=auto")
        folder = folders / str(len(list(folders.iterdir())))
        return train(*options, *overrides, folder=folder, steps=steps)

    return go_on


def trained(run):
    """Returns the metrics of training of each step of a run, without times and what features log about themselves."""
    return [
        {name: value for name, value in step.items() if not any(fnmatch.fnmatch(name, skip) for skip in NOT_COMPARED)}
        for step in run.steps.values()
    ]


def test_lossless_features_may_come_and_go_at_a_resume(resumed, tmp_path):
    stock, mixed = tmp_path / "stock", tmp_path / "mixed"
    resumed(stock, 1)
    shutil.copytree(stock, mixed)
    for steps, overrides in ((2, LOSSLESS), (3, ())):
        with_features = resumed(mixed, steps, *overrides)
        without = resumed(stock, steps)
        assert list(with_features.steps) == [steps]
        assert trained(with_features) == trained(without)
        on = {process.role for process in with_features.processes if process.requested["gae"] != "off"}
        assert ("rl_accel/gae/applied" in with_features.steps[steps]) == bool(overrides), (
            on,
            with_features.log[-4000:],
        )


def test_tail_batching_that_is_switched_off_says_what_it_leaves_and_is_not_resumed_later(resumed, tmp_path):
    checkpoints, tail = tmp_path / "checkpoints", "+rl_accel.tail_batching.enable=True"
    first = resumed(checkpoints, 2, *TAIL, tail)
    assert first.numbers("tail_batching/queue_length") == [1, 0]  # the last round leaves none
    shutil.rmtree(checkpoints / "global_step_2")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("1")
    second = resumed(checkpoints, 2, *TAIL, "+rl_accel.telemetry.enable=True")
    assert list(second.steps) == [2]
    left = f"tail_batching is off, and prompts that it had deferred in {checkpoints}/global_step_1 are not trained"
    assert left in second.log
    with pytest.raises(AssertionError, match="global_step_2 was saved without tail batching"):
        resumed(checkpoints, 3, *TAIL, tail)
