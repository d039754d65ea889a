"""A recipe is checked before anything runs, and its errors name the key, what was wanted and the nearest known one; plans hold
the exact command of each run."""

import sys
from pathlib import Path

import pytest

from rl_accel.errors import RecipeError
from rl_accel.lab.ab.recipe import load, plan_runs, prepare_command, save
from rl_accel.lab.ab.runner import RunResult

HOME, OUT = Path("/home/r"), Path("/out")
PLATFORMS = {
    "gpu": {"gpus": 8, "overrides": ["model=big", "n=${gpus}x${nodes}"], "env": {"DEVICE": "cuda"}},
    "cpu": {"steps": 2, "overrides": ["model=tiny"], "env": {"DEVICE": "cpu"}, "checks": {"identical": ["a"]}},
}


@pytest.fixture
def recipe(recipe_file):
    return lambda platform=None, **changes: load(recipe_file(**changes), platform)


def test_every_section_is_read_placeholders_stay_and_the_first_arm_is_the_baseline_when_none_is_named(recipe):
    overrides = ["a=${run_dir}/x", "b=${data.train_batch_size}", "c=${oc.env:HOME}", "d=5"]
    checks = {"faster": {"adv": 2}, "warn_only": ["faster"], "rollout_probs_diff": None}
    env, metrics = {"A": 1, "B": True, "C": None}, {"reward": "r", "warmup_steps": 0}
    effective = recipe(seeds=[3, 4], env=env, metrics=metrics, checks=checks, overrides=overrides, baseline="")
    assert (list(effective.arms), effective.baseline) == (["stock", "accelerated"], "stock")
    assert effective.arms["accelerated"].overrides == ["adv=0.1"]
    assert (effective.seeds, effective.env, effective.overrides) == ([3, 4], env, overrides)
    assert (effective.metrics.reward, effective.metrics.warmup_steps) == ("r", 0)
    assert "gen" in effective.metrics.stages
    assert (effective.checks.faster, effective.checks.rollout_probs_diff) == ({"adv": 2.0}, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 3}, "step: Key 'step' not in 'Recipe'"),
        ({"arms": {"a": {"overides": []}}}, r"arms\.a\.overides: Key 'overides' not in 'Arm'"),
        ({"metrics": {"rewards": "x"}}, r"metrics\.rewards: Key 'rewards' not in 'Metrics'"),
        ({"steps": "many"}, "steps: Value 'many' .* could not be converted to Integer"),
        ({"steps": 0}, "steps wants at least 1, found 0"),
        ({"timeout_s": "long"}, "timeout_s: Value 'long' .* could not be converted to Float"),
        ({"timeout_s": 0}, "timeout_s wants a number above 0"),
        ({"overrides": "a=1"}, "overrides: "),
        ({"overrides": [["a=1"]]}, r"overrides\[0\]: "),
        ({"arms": ["stock"]}, "arms wants a mapping"),
        ({"arms": {}}, "arms wants a mapping from arm names to arms, found nothing"),
        ({"arms": {"stock": 3}}, "arms.stock: "),
        ({"arms": {"a/b": {}}, "baseline": "a/b"}, "name of an arm wants letters"),
        ({"metrics": 3}, "metrics wants a mapping, found 3"),
        ({"arms": {"stock": {"seeds": [1]}}}, r"arms.stock.seeds wants some of \[0\], found \[1\]"),
        ({"baseline": "stok"}, "baseline wants one of stock, accelerated, found 'stok'"),
        ({"command": []}, "command wants a list"),
        ({"name": ""}, "name wants letters"),
        ({"name": None}, "name: .*None"),
        ({"seeds": [1, 1]}, "seeds wants different numbers"),
        ({"seeds": [-1]}, "seeds wants different numbers of at least 0"),
        ({"seeds": [0, 1], "seed_overrides": []}, "seeds: several want seed_overrides"),
        ({"env": {"A": [1]}}, "env.A wants text, a number"),
        ({"metrics": {"warmup_steps": -1}}, "warmup_steps wants at least 0"),
        ({"checks": {"faster": {"adw": 2}}}, r"checks.faster wants some of .*, found adw \(did you mean adv\?\)"),
        (
            {"checks": {"same_training": {"stok": 2}}},
            r"same_training wants some of .*, found stok \(did you mean stock\?\)",
        ),
        ({"rollout": {"faster": {"stok": 2}}}, r"rollout.faster wants some of accelerated, found stok"),
        ({"rollout": {"faster": {"stock": 2}}}, "rollout.faster wants some of accelerated, found stock"),
        (
            {"checks": {"warn_only": ["fast"]}},
            r"checks.warn_only wants some of .*, found fast \(did you mean faster\?\)",
        ),
        ({"overrides": ["a=${unclosed"]}, r"no viable"),
        ({"platforms": ["cpu"]}, r"platforms wants a mapping .* found \['cpu'\]"),
        ({"platforms": {"cpu": {"step": 3}}}, "step: Key 'step' not in 'Recipe'"),
        ({"platforms": {"cpu": 3}}, "each of its platforms is a mapping, found 3"),
    ],
)
def test_a_wrong_recipe_is_refused_with_the_key(recipe_file, changes, message):
    path = recipe_file(**changes)
    with pytest.raises(RecipeError, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}")
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_is_absent_or_no_mapping_is_refused_with_its_path(tmp_path):
    path = tmp_path / "r"
    with pytest.raises(RecipeError, match=r"cannot read the recipe .*/r"):
        load(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match=r"cannot read the recipe .*/r"):
        load(path)
    for text in ("", "just text", "- a\n- list", "a: [unclosed", "a: 1\na: 2"):
        path.write_text(text)
        with pytest.raises(RecipeError, match=r"/r(:| is not valid YAML)"):
            load(path)


def test_a_recipe_extends_another(recipe_file, tmp_path):
    base = {"overrides": ["a=1", "b=${seed}"], "env": {"A": 1, "B": 2}, "checks": {"reward_gain": 0.1}, "seeds": [1, 2]}
    changes = {"name": "other", "overrides": ["a=2", "x=${now:%Y}"], "env": {"B": 3}}
    changes |= {"arms": {"only": {}}, "baseline": "only"}
    recipe_file(**base)
    extended = load(recipe_file("other.yaml", extends="recipe.yaml", checks={"warn_only": ["faster"]}, **changes))
    assert (extended.name, list(extended.arms), extended.env) == ("other", ["only"], {"A": 1, "B": 3})
    assert extended.overrides == ["a=1", "b=${seed}", "a=2", "x=${now:%Y}"], "the later one of equal overrides counts"
    assert (extended.checks.reward_gain, extended.checks.warn_only) == (0.1, ["faster"])
    assert (extended.seeds, extended.steps) == ([1, 2], 8), "what is not named is the other recipe's"
    save(extended, tmp_path / "kept.yaml")
    assert load(tmp_path / "kept.yaml") == extended, "a kept recipe no longer needs what it extended"


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        ({}, {"extends": "absent.yaml"}, r"cannot read the recipe .*absent.yaml"),
        ({}, {"extends": 3}, "extends wants the name of a recipe file, found 3"),
        ({}, {"extends": "other.yaml"}, r"extends other\.yaml, which extends this recipe in turn"),
        ({"extends": "other.yaml"}, {}, "which extends this recipe in turn"),
        ({}, {"chekcs": {}}, r"other\.yaml: chekcs: Key 'chekcs' not in 'Recipe'"),
    ],
)
def test_extending_what_is_not_there_or_itself_is_refused(recipe_file, base, changes, message):
    recipe_file(**base)
    with pytest.raises(RecipeError, match=message):
        load(recipe_file("other.yaml", **{"extends": "recipe.yaml", **changes}))


def test_commands_join_common_seed_step_and_arm_overrides_in_this_order(recipe):
    overrides = ["x=${recipe_dir}/d", "y=${data.z}", "o=${run_dir}:${out}:${arm}"]
    plans = plan_runs(recipe(command=["python", "t.py"], overrides=overrides), HOME, OUT, seeds=[7], steps=3)
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


def test_environment_values_become_text_the_arm_wins_and_prepare_does_not_depend_on_a_run(recipe):
    spec = recipe(env={"A": False, "B": 2, "C": "${seed}", "D": None}, arms={"stock": {"env": {"B": 3, "A": None}}})
    assert plan_runs(spec, HOME, OUT, seeds=[5])[0].env == {"A": None, "B": "3", "C": "5", "D": None}
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
        ({}, {"steps": 0}, "--steps wants at least 1"),
        ({"command": ["${recipe_dri}/t"]}, {}, r"command: unknown placeholder \$\{recipe_dri\} \(did you mean"),
        ({"env": {"A": "${sed}"}}, {}, r"env.A: unknown placeholder \$\{sed\}"),
    ],
)
def test_wrong_options_and_placeholders_are_refused(recipe, changes, arguments, message):
    with pytest.raises(RecipeError, match=message):
        plan_runs(recipe(**changes), HOME, OUT, **arguments)


def test_a_result_is_of_a_plan_with_the_same_command_environment_and_steps(recipe):
    def plan(steps=3, **changes):
        return plan_runs(recipe(**changes), HOME, OUT, steps=steps)[0]

    result = RunResult("stock", 0, 3, list(plan().command), {})
    assert result.is_of(plan(description="other text"))
    assert not any(map(result.is_of, (plan(steps=4), plan(overrides=["a=1"]), plan(env={"A": 1}))))


def test_the_first_platform_is_the_default_and_another_is_chosen_by_name(recipe_file):
    path = recipe_file(platforms=PLATFORMS, overrides=["common=1"], env={"A": 1})
    stock, on_cpu = load(path), load(path, "cpu")
    assert (stock.gpus, stock.env) == (8, {"A": 1, "DEVICE": "cuda"})
    assert {"common=1", "model=big", "n=8x1"} <= set(plan_runs(stock, HOME, OUT)[0].command)
    assert (on_cpu.gpus, on_cpu.steps, on_cpu.env) == (1, 2, {"A": 1, "DEVICE": "cpu"})
    assert on_cpu.checks.identical == ["a"]
    words = plan_runs(on_cpu, HOME, OUT)[0].command
    assert ("model=tiny" in words, "model=big" in words) == (True, False)
    with pytest.raises(RecipeError, match=r"no platform 'cpus'; there are gpu, cpu"):
        load(path, "cpus")
    with pytest.raises(RecipeError, match="no platform 'cpu'; it has none"):
        load(recipe_file(), "cpu")


def test_a_platform_may_stand_in_a_file_of_its_own_and_a_recipe_that_extends_another_adds_to_its(recipe_file):
    path = recipe_file(platforms={"gpu": {}, "cpu": {"extends": "cpu.yaml", "overrides": ["later=1"]}})
    recipe_file("cpu.yaml", overrides=["model=tiny"], steps=3)
    assert load(path, "cpu").overrides[-2:] == ["model=tiny", "later=1"]
    assert load(path, "cpu").steps == 3
    base = recipe_file(platforms=PLATFORMS)
    path = recipe_file("larger.yaml", extends="recipe.yaml", platforms={"gpu": {"gpus": 4, "overrides": ["n=2"]}})
    assert load(path).gpus == 4
    assert load(path).overrides[-3:] == ["model=big", "n=${gpus}x${nodes}", "n=2"]
    assert load(path, "cpu") == load(base, "cpu")


def test_a_variable_of_the_shell_is_filled_in_or_missed_by_name(recipe_file, monkeypatch):
    path = recipe_file(env={"MODELS": "${oc.env:MODEL_DIR}/x"}, overrides=["data=${oc.env:DATA}", "a=${oc.env:LEFT,b}"])
    monkeypatch.setenv("MODEL_DIR", "/models")
    monkeypatch.delenv("DATA", raising=False)
    with pytest.raises(RecipeError, match=r"overrides: .*wants the environment variable DATA, which is not set"):
        plan_runs(load(path), HOME, OUT)
    monkeypatch.setenv("DATA", "/data")
    plan = plan_runs(load(path), HOME, OUT)[0]
    assert {"data=/data", "a=${oc.env:LEFT,b}"} <= set(plan.command)  # with a default it is hydra's own
    assert plan.env["MODELS"] == "/models/x"


EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
RECIPES = [path for path in sorted(EXAMPLES.glob("verl_*/*.yaml")) if path.name not in ("cpu.yaml", "loops.yaml")]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_responses_of_an_example_fit_the_model_that_it_prepares(path):
    """One that extends another has the overrides of that, but a model of its own."""
    try:
        recipe = load(path, "cpu")
    except RecipeError:  # it has no platforms
        recipe = load(path)
    values = dict(override.lstrip("+").split("=", 1) for override in recipe.overrides)
    options = recipe.prepare
    limit = int(options[options.index("--limit") + 1]) if "--limit" in options else 1024
    assert int(values["data.max_response_length"]) <= limit
    assert int(values.get("actor_rollout_ref.rollout.max_model_len", 0)) <= 2 * limit
