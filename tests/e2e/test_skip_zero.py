"""Tests skip_zero in real verl with binary rewards: each step has the same bits as stock, in less time."""

from fnmatch import fnmatch

import pytest
import yaml

from rl_accel.lab.ab.recipe import NOT_COMPARED

pytestmark = [pytest.mark.full, pytest.mark.timeout(2400)]

STEPS = 15
OF_TRAINED_ROWS = ["actor/ppo_kl", "actor/pg_clipfrac*"]
OVERRIDES = [
    "trainer.test_freq=-1",
    "trainer.val_before_train=False",
    "actor_rollout_ref.rollout.name=hf_cpu",
    "data.max_response_length=512",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_epochs=2",
    # a response a micro-batch, so that the packing is the same whatever is left out
    "actor_rollout_ref.actor.use_dynamic_bsz=False",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=False",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
]


@pytest.fixture(scope="module")
def steps(ab, read_metrics, repo, tmp_path_factory):
    """The metrics of each step, by arm."""
    folder = tmp_path_factory.mktemp("skip_zero")
    base = repo / "examples" / "verl_vllm_cpu" / "recipe.yaml"
    prepare = f"python {repo}/examples/verl_ppo_cpu/prepare.py ${{out}}/task --lengths published".split()
    reward = f"reward.custom_reward_function.path={base.parent / 'reward.py'}"
    arms = {"stock": [], "skip_zero": ["+rl_accel.skip_zero.enable=True"]}
    recipe = {"extends": str(base), "overrides": [reward, *OVERRIDES]}
    recipe["arms"] = {arm: {"overrides": overrides} for arm, overrides in arms.items()}
    recipe["checks"] = {"faster": {}, "same_training": {}}
    recipe["rollout"] = {"wasted_tokens": {}}
    recipe["prepare"] = [*prepare, "--prompts", "64", "--limit", "512"]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    ab(folder / "recipe.yaml", folder / "ab", f"--steps={STEPS}")
    return {arm: [*read_metrics(folder / f"ab/{arm}-seed0/metrics.jsonl").values()] for arm in arms}


def test_every_metric_of_training_is_identical_but_for_means_over_rows(steps):
    assert len(steps["stock"]) == len(steps["skip_zero"]) == STEPS
    for stock, ours in zip(steps["stock"], steps["skip_zero"], strict=True):
        names = [name for name in stock if not any(fnmatch(name, p) for p in (*NOT_COMPARED, *OF_TRAINED_ROWS))]
        assert "actor/grad_norm" in names
        # verl adds the losses of all micro-batches in float32: zeros among them change the order of the sum
        names.remove("actor/loss")
        assert ours["actor/loss"] == pytest.approx(stock["actor/loss"], rel=1e-5, abs=1e-7)
        assert {name: ours[name] for name in names} == {name: stock[name] for name in names}


def test_the_log_says_what_was_left_out(steps):
    for ours in steps["skip_zero"]:
        assert ours["rl_accel/skip_zero/rows"] % 2 == 0  # of two epochs
        assert ours["rl_accel/skip_zero/tokens"] >= ours["rl_accel/skip_zero/rows"]
        assert ours["rl_accel/skip_zero/seconds_saved"] >= 0
    assert sum(ours["rl_accel/skip_zero/rows"] for ours in steps["skip_zero"]) > 0.3 * STEPS * 2 * 32
    assert not any(name.startswith("rl_accel/skip_zero") for stock in steps["stock"] for name in stock)
