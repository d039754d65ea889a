"""Tests the lossless features of a common GRPO run in real verl: binary rewards, one update a batch, validations.

Each value that verl logs, each response and each state of the data loader is that of stock, bit for bit.
"""

import json
import re
from fnmatch import fnmatch

import pytest
import torch
import yaml
from torch.utils._pytree import tree_map

from rl_accel.lab.ab.recipe import NOT_COMPARED

pytestmark = [pytest.mark.timeout(2400)]

STEPS = 6
VALIDATED = (0, 2, 4, 6)
OVERLAPPED = (1, 3, 5)
"""Steps whose rollout begins during a validation. No step follows the last."""
OF_TRAINED_ROWS = ("actor/ppo_kl", "actor/pg_clipfrac*")
"""Means over the responses that skip_zero does not leave out."""
OVERRIDES = [
    "actor_rollout_ref.rollout.name=hf_cpu",
    "data.max_response_length=512",
    # a response a micro-batch, so that the packing is the same whatever is left out
    "actor_rollout_ref.actor.use_dynamic_bsz=False",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=False",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    # verl logs rollout_corr/* then, too
    "actor_rollout_ref.rollout.calculate_log_probs=True",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
    "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
    "data.val_batch_size=12",  # 32 prompts in three batches, the last of them smaller
    "trainer.test_freq=2",
    "trainer.save_freq=2",
    "trainer.val_before_train=True",
    "trainer.log_val_generations=4",
    "trainer.validation_data_dir=${run_dir}/validations",
]
COMMON = ["+rl_accel.sampler.enable=True", "+rl_accel.skip_zero.enable=True"]
REUSE, OVERLAP = "+rl_accel.reuse_log_probs.enable=True", "+rl_accel.overlap_validation.enable=True"
ARMS = {
    "stock": [],
    "reuse": [*COMMON, REUSE],
    "overlap": [*COMMON, OVERLAP],
    "both": ["+rl_accel.auto=True"],
}
ACCELERATED = [arm for arm in ARMS if arm != "stock"]


@pytest.fixture(scope="module")
def out(ab, repo, probe_environment, tmp_path_factory):
    """The folder that ``rl-accel ab`` writes."""
    folder = tmp_path_factory.mktemp("grpo")
    base = repo / "examples" / "verl_vllm_cpu" / "recipe.yaml"
    prepare = (
        f"python {repo}/examples/verl_ppo_cpu/prepare.py ${{out}}/task --lengths published --prompts 64 --limit 512"
    )
    recipe = {
        "extends": str(base),
        "prepare": prepare.split(),
        "env": {"VERL_USE_EXTERNAL_MODULES": "verl_on_cpu.plugin,saves_between"},
        "overrides": [f"reward.custom_reward_function.path={base.parent / 'reward.py'}", *OVERRIDES],
        "arms": {arm: {"overrides": overrides} for arm, overrides in ARMS.items()},
        "checks": {"faster": {}, "same_training": {}},
        "rollout": {"wasted_tokens": {}},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    python_path = {"PYTHONPATH": probe_environment(folder)["PYTHONPATH"]}
    ab(folder / "recipe.yaml", folder / "ab", f"--steps={STEPS}", env=python_path)
    return folder / "ab"


@pytest.fixture(scope="module")
def steps(out, read_lines):
    """All values that verl has logged, by arm and step. Step 0 has the first validation."""
    return {arm: {row["step"]: row["data"] for row in read_lines(out / f"{arm}-seed0/metrics.jsonl")} for arm in ARMS}


@pytest.mark.parametrize("arm", ACCELERATED)
def test_every_value_is_that_of_stock(steps, arm):
    assert list(steps["stock"]) == list(steps[arm]) == list(range(STEPS + 1))
    for step, stock in steps["stock"].items():
        ours = steps[arm][step]
        names = [name for name in stock if not any(fnmatch(name, p) for p in (*NOT_COMPARED, *OF_TRAINED_ROWS))]
        assert any(name.startswith("val-core/") for name in names) == (step in VALIDATED)
        if step:
            assert {"actor/grad_norm", "actor/entropy", "training/rollout_probs_diff_mean"} <= {*names}
            assert any(name.startswith("rollout_corr/") for name in names)
            # verl adds the losses of all micro-batches in float32: zeros among them change the order of the sum
            names.remove("actor/loss")
            assert ours["actor/loss"] == pytest.approx(stock["actor/loss"], rel=1e-5, abs=1e-7)
        assert {name: ours.get(name) for name in names} == {name: stock[name] for name in names}
        others = {name for name in ours.keys() - stock.keys() if not name.startswith("rl_accel/")}
        assert not others


@pytest.mark.parametrize("arm", ACCELERATED)
@pytest.mark.parametrize("kind", ["validations", "rollouts"])
def test_every_response_is_that_of_stock_and_in_the_file_of_its_step(out, arm, kind):
    def responses(name):
        files = sorted((out / f"{name}-seed0" / kind).glob("*.jsonl"))
        rows = {file.name: [json.loads(line) for line in file.read_text().splitlines()] for file in files}
        keys = ("input", "output", "score", "step", "gts")
        return {name: sorted([row[key] for key in keys] for row in rows) for name, rows in rows.items()}

    stock = responses("stock")
    assert len(stock) == (len(VALIDATED) if kind == "validations" else STEPS)
    assert responses(arm) == stock


@pytest.mark.parametrize("arm", ACCELERATED)
def test_checkpoints_continue_with_the_same_prompts(out, arm):
    """Also a checkpoint that is saved between a validation and the next step, whose prompts are running by then."""

    def states(name):
        folder = out / f"{name}-seed0/checkpoints"
        files = [folder / f"global_step_{step}" / "data.pt" for step in VALIDATED[1:]]
        saved = [torch.load(file, weights_only=False) for file in files]
        saved += [state for state, _ in states_between(out, name).values()]
        return tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, saved)

    assert states(arm) == states("stock")


@pytest.mark.parametrize("arm", ["overlap", "both"])
def test_rollouts_begin_during_validations(out, steps, arm):
    submitted = {step: count for step, (_, count) in states_between(out, arm).items()}
    assert submitted == {step: 8 if step + 1 in OVERLAPPED else 0 for step in VALIDATED}
    prefix = "rl_accel/overlap_validation/"
    for name, logged in {
        "ahead_seconds": [1, 3, 5],
        "seconds_saved": [3, 5],
    }.items():  # step 1 has nothing to compare with
        assert [step for step, ours in steps[arm].items() if prefix + name in ours] == logged


def test_a_healthy_run_with_auto_has_no_warning_of_ours(out):
    log = (out / "both-seed0" / "train.log").read_text()
    assert "rl-accel: final_output stays off: rl_accel.final_output wants" in log
    assert [line for line in log.splitlines() if re.search("(WARN|ERROR).*rl-accel: ", line)] == []


@pytest.mark.parametrize("arm", ["reuse", "both"])
def test_all_steps_but_the_first_reuse_log_probabilities(steps, arm):
    ours = list(steps[arm].values())[1:]
    stock = list(steps["stock"].values())[1:]
    assert [step["rl_accel/reuse_log_probs/applied"] for step in ours] == [0.0] + [1.0] * (STEPS - 1)
    for step in ours[1:]:
        assert (step["rl_accel/reuse_log_probs/share"] < 1) == (step["rl_accel/skip_zero/rows"] > 0)
    forward_seconds = sum(step["timing_s/old_log_prob"] for step in stock[1:])
    assert sum(step["timing_s/old_log_prob"] for step in ours[1:]) < forward_seconds
    assert (
        sum(step["rl_accel/reuse_log_probs/seconds_saved"] for step in ours[1:]) < 2 * forward_seconds
    )  # busy machines


def states_between(out, arm):
    """Returns the data loader's state and the number of submitted training prompts after each validation, by step."""
    return {step: torch.load(out / f"{arm}-seed0" / f"between_{step}.pt", weights_only=False) for step in VALIDATED}
