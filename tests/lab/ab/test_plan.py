"""Plans hold the exact command of each run."""

import sys
from pathlib import Path

import pytest

from rl_accel.errors import RecipeError
from rl_accel.lab.ab.recipe import load, plan_runs, prepare_command

HOME, OUT = Path("/home/r"), Path("/out")


@pytest.fixture
def recipe(recipe_file):
    return lambda **changes: load(recipe_file(**changes))


def test_commands_join_common_seed_step_and_arm_overrides_in_this_order(recipe):
    spec = recipe(
        command=["python", "t.py"], overrides=["x=${recipe_dir}/d", "y=${data.z}", "o=${run_dir}:${out}:${arm}"]
    )
    plans = plan_runs(spec, HOME, OUT, seeds=[7], steps=3)
    assert [plan.name for plan in plans] == ["stock-seed7", "accelerated-seed7"]
    run_dir = OUT / "accelerated-seed7"
    assert plans[1].command == (
        *(sys.executable, "t.py", "x=/home/r/d", "y=${data.z}", f"o={run_dir}:/out:accelerated"),
        *("seed=7", "steps=3", "adv=0.1"),
    )
    assert plans[1].directory == run_dir


def test_all_arms_of_a_seed_come_before_the_next_and_an_arm_has_its_own_seeds_only(recipe):
    names = [plan.name for plan in plan_runs(recipe(), HOME, OUT, arms=["accelerated", "stock"], seeds=[1, 0])]
    assert names == ["accelerated-seed1", "stock-seed1", "accelerated-seed0", "stock-seed0"]
    arms = {"stock": {}, "extra": {"seeds": [1]}}
    names = [plan.name for plan in plan_runs(recipe(arms=arms, seeds=[0, 1]), HOME, OUT)]
    assert names == ["stock-seed0", "stock-seed1", "extra-seed1"]


def test_environment_values_become_text_and_the_arm_wins(recipe):
    spec = recipe(env={"A": False, "B": 2, "C": "${seed}", "D": None}, arms={"stock": {"env": {"B": 3, "A": None}}})
    assert plan_runs(spec, HOME, OUT, seeds=[5])[0].env == {"A": None, "B": "3", "C": "5", "D": None}


def test_prepare_does_not_depend_on_a_run(recipe):
    spec = recipe(prepare=["python", "p.py", "${out}"], env={"A": "${recipe_dir}", "B": "${seed}"})
    assert prepare_command(spec, HOME, OUT) == ([sys.executable, "p.py", "/out"], {"A": "/home/r"})
    assert prepare_command(recipe(), HOME, OUT)[0] == []
    with pytest.raises(RecipeError, match="prepare: unknown placeholder"):
        prepare_command(recipe(prepare=["python", "${seed}"]), HOME, OUT)


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({}, {"arms": ["stok"]}, r"no arm 'stok' \(did you mean stock\?\); arms are stock, accelerated"),
        ({}, {"arms": []}, "--arms wants different arms, found nothing"),
        ({}, {"arms": ["stock", "stock"]}, "--arms wants different arms"),
        ({}, {"seeds": [1, 1]}, "--seeds wants different numbers"),
        ({}, {"seeds": []}, "--seeds wants different numbers"),
        ({}, {"seeds": [-1]}, "--seeds wants"),
        ({}, {"steps": 0}, "--steps wants at least 1"),
        ({"seed_overrides": []}, {"seeds": [0, 1]}, "--seeds: several want seed_overrides"),
        ({"command": ["${recipe_dri}/t"]}, {}, r"command: unknown placeholder \$\{recipe_dri\} \(did you mean"),
        ({"env": {"A": "${sed}"}}, {}, r"env.A: unknown placeholder \$\{sed\}"),
    ],
)
def test_wrong_options_and_placeholders_are_refused(recipe, changes, arguments, message):
    with pytest.raises(RecipeError, match=message):
        plan_runs(recipe(**changes), HOME, OUT, **arguments)


def test_the_fingerprint_follows_command_environment_and_steps(recipe):
    def fingerprint(steps=3, **changes):
        return plan_runs(recipe(**changes), HOME, OUT, steps=steps)[0].fingerprint

    assert fingerprint() == fingerprint(description="other text")
    assert len({fingerprint(), fingerprint(steps=4), fingerprint(overrides=["a=1"]), fingerprint(env={"A": 1})}) == 4
