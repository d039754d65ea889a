"""A recipe is checked before anything runs, and its errors name the key, what was wanted and the nearest known one."""

from pathlib import Path

import pytest
import yaml

from rl_accel.errors import RecipeError
from rl_accel.lab.ab.recipe import Recipe, load, save


def test_reads_every_section(recipe_file):
    recipe = load(
        recipe_file(
            seeds=[3, 4],
            env={"A": 1, "B": True, "C": None},
            metrics={"reward": "r", "warmup_steps": 0},
            checks={"faster": {"adv": 2}, "warn_only": ["faster"], "rollout_probs_diff": None},
        )
    )
    assert list(recipe.arms) == ["stock", "accelerated"]
    assert recipe.arms["accelerated"].overrides == ["adv=0.1"]
    assert recipe.seeds == [3, 4]
    assert recipe.env == {"A": 1, "B": True, "C": None}
    assert (recipe.metrics.reward, recipe.metrics.warmup_steps) == ("r", 0)
    assert recipe.metrics.stages == Recipe().metrics.stages
    assert (recipe.checks.faster, recipe.checks.rollout_probs_diff) == ({"adv": 2.0}, None)


def test_placeholders_stay_as_they_are_and_the_first_arm_is_the_baseline_when_none_is_named(recipe_file):
    overrides = ["a=${run_dir}/x", "b=${data.train_batch_size}", "c=${oc.env:HOME}", "d=5"]
    recipe = load(recipe_file(overrides=overrides, baseline=""))
    assert (recipe.overrides, recipe.baseline) == (overrides, "stock")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 3}, r"unknown key step \(did you mean steps\?\); a recipe takes name, "),
        (
            {"arms": {"a": {"overides": []}}},
            r"unknown key arms\.a\.overides \(did you mean overrides\?\); arms.a takes",
        ),
        ({"metrics": {"rewards": "x"}}, r"unknown key metrics\.rewards \(did you mean reward\?\); metrics takes"),
        ({"checks": {"identic": []}}, r"unknown key checks\.identic \(did you mean identical\?\)"),
        ({"steps": "many"}, "steps wants int"),
        ({"steps": True}, "steps wants int"),
        ({"steps": 0}, "steps wants at least 1, found 0"),
        ({"timeout_s": "long"}, "timeout_s wants float or null"),
        ({"timeout_s": 0}, "timeout_s wants a number above 0"),
        ({"overrides": "a=1"}, "overrides wants a list of str"),
        ({"overrides": {"a": 1}}, "overrides wants a list of str"),
        ({"overrides": [["a=1"]]}, r"overrides wants a list of str, found \[\['a=1'\]\]"),
        ({"arms": ["stock"]}, "arms wants a mapping from arm names to arms"),
        ({"arms": {}}, "arms wants a mapping from arm names to arms, found nothing"),
        ({"arms": {"stock": 3}}, "arms.stock"),
        ({"arms": {"a/b": {}}, "baseline": "a/b"}, "name of an arm wants letters"),
        ({"metrics": 3}, "metrics wants a mapping with the keys reward"),
        ({"arms": {"stock": {"seeds": [1]}}}, r"arms.stock.seeds wants some of \[0\], found \[1\]"),
        ({"baseline": "stok"}, "baseline wants one of stock, accelerated, found 'stok'"),
        ({"command": []}, "command wants a list"),
        ({"name": ""}, "name wants letters"),
        ({"name": None}, "name wants str"),
        ({"seeds": [1, 1]}, "seeds wants different numbers"),
        ({"seeds": [-1]}, "seeds wants different numbers of at least 0"),
        ({"seeds": [0, 1], "seed_overrides": []}, "seeds: several want seed_overrides"),
        ({"env": {"A": [1]}}, "env.A wants text, a number"),
        ({"metrics": {"warmup_steps": -1}}, "warmup_steps wants at least 0"),
        ({"metrics": {"average": "mode"}}, "metrics.average wants one of median, mean, found 'mode'"),
        ({"checks": {"faster": {"adw": 2}}}, r"checks.faster.adw is not a stage \(did you mean adv\?\)"),
        ({"rollout": {"faster": {"stok": 2}}}, r"rollout.faster.stok is no arm to compare \(did you mean stock\?\)"),
        ({"rollout": {"faster": {"stock": 2}}}, "rollout.faster.stock is no arm to compare"),
        ({"checks": {"warn_only": ["fast"]}}, r"unknown check 'fast' \(did you mean faster\?\)"),
        ({"overrides": ["a=${unclosed"]}, r"overrides\[0\]: no viable"),
    ],
)
def test_a_wrong_recipe_is_refused_with_the_key(recipe_file, changes, message):
    path = recipe_file(**changes)
    with pytest.raises(RecipeError, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (text, "/r(:| is not valid YAML)")
            for text in ("", "just text", "- a\n- list", "a: [unclosed", "a: 1\na: 2")
        ),
        (b"\xff\xfe\x00", r"cannot read the recipe .*/r"),
        (None, r"cannot read the recipe .*/r"),
    ],
)
def test_a_file_that_is_absent_or_no_mapping_is_refused_with_its_path(text, message, tmp_path):
    if text is not None:
        (tmp_path / "r").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RecipeError, match=message):
        load(tmp_path / "r")


@pytest.fixture
def extended(recipe_file):
    """Write a recipe and another one that extends it with the given keys; return the path of the second."""

    def write(base=None, **changes):
        first = recipe_file(**(base or {}))
        folder = first.parent / "other"
        folder.mkdir(exist_ok=True)
        second = folder / "recipe.yaml"
        second.write_text(yaml.safe_dump({"extends": "../recipe.yaml", **changes}))
        return second

    return write


def test_a_recipe_extends_another(extended, tmp_path):
    base = {"overrides": ["a=1", "b=${seed}"], "env": {"A": 1, "B": 2}, "checks": {"reward_gain": 0.1}, "seeds": [1, 2]}
    changes = {
        "name": "other",
        "overrides": ["a=2", "x=${now:%Y}"],
        "env": {"B": 3},
        "arms": {"only": {}},
        "baseline": "only",
    }
    found = load(extended(base, checks={"zero_tolerance": 1.0}, **changes))
    assert found.name == "other"
    assert found.overrides == ["a=1", "b=${seed}", "a=2", "x=${now:%Y}"], "the later one of equal overrides counts"
    assert found.env == {"A": 1, "B": 3}
    assert (found.checks.reward_gain, found.checks.zero_tolerance) == (0.1, 1.0)
    assert list(found.arms) == ["only"]
    assert (found.seeds, found.steps) == ([1, 2], 8), "what is not named is the other recipe's"
    save(found, tmp_path / "kept.yaml")
    assert load(tmp_path / "kept.yaml") == found, "a kept recipe no longer needs what it extended"


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        ({}, {"extends": "absent.yaml"}, r"cannot read the recipe .*absent.yaml"),
        ({}, {"extends": 3}, "extends wants the name of a recipe file, found 3"),
        ({}, {"extends": "recipe.yaml"}, r"extends recipe\.yaml, which extends this recipe in turn"),
        ({"extends": "other/recipe.yaml"}, {}, "which extends this recipe in turn"),
        ({}, {"chekcs": {}}, r"unknown key chekcs \(did you mean checks\?\)"),
    ],
)
def test_extending_what_is_not_there_or_itself_is_refused(extended, base, changes, message):
    with pytest.raises(RecipeError, match=message):
        load(extended(base, **changes))


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
