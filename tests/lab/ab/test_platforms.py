"""One recipe file for several machines: what a platform puts upon the rest, and the placeholders that go with it."""

from pathlib import Path

import pytest
import yaml

from rl_accel.errors import RecipeError
from rl_accel.lab.ab.recipe import load, plan_runs

PLATFORMS = {
    "gpu": {"gpus": 8, "overrides": ["model=big", "n=${gpus}x${nodes}"], "env": {"DEVICE": "cuda"}},
    "cpu": {"steps": 2, "overrides": ["model=tiny"], "env": {"DEVICE": "cpu"}, "checks": {"identical": ["a"]}},
}


def command(recipe, path):
    return plan_runs(recipe, path.parent, path.parent / "out")[0].command


def test_the_first_platform_is_the_default_and_another_is_chosen_by_name(recipe_file):
    path = recipe_file(platforms=PLATFORMS, overrides=["common=1"], env={"A": 1})
    stock, on_cpu = load(path), load(path, "cpu")
    assert (stock.gpus, stock.env) == (8, {"A": 1, "DEVICE": "cuda"})
    assert {"common=1", "model=big", "n=8x1"} <= set(command(stock, path))
    assert (on_cpu.gpus, on_cpu.steps, on_cpu.env) == (1, 2, {"A": 1, "DEVICE": "cpu"})
    assert on_cpu.checks.identical == ["a"]
    assert "model=tiny" in command(on_cpu, path)
    assert "model=big" not in command(on_cpu, path)


def test_a_platform_may_stand_in_a_file_of_its_own(recipe_file):
    path = recipe_file(platforms={"gpu": {}, "cpu": {"extends": "cpu.yaml", "overrides": ["later=1"]}})
    (path.parent / "cpu.yaml").write_text(yaml.safe_dump({"overrides": ["model=tiny"], "steps": 3}))
    assert load(path, "cpu").overrides[-2:] == ["model=tiny", "later=1"]
    assert load(path, "cpu").steps == 3


def test_a_recipe_that_extends_another_adds_to_its_platforms(recipe_file):
    base = recipe_file(platforms=PLATFORMS)
    (base.parent / "base.yaml").write_text(base.read_text())
    path = base.parent / "larger.yaml"
    path.write_text(yaml.safe_dump({"extends": "base.yaml", "platforms": {"gpu": {"gpus": 4, "overrides": ["n=2"]}}}))
    assert load(path).gpus == 4
    assert load(path).overrides[-3:] == ["model=big", "n=${gpus}x${nodes}", "n=2"]
    assert load(path, "cpu") == load(base, "cpu")


@pytest.mark.parametrize(
    ("changes", "platform", "message"),
    [
        ({"platforms": PLATFORMS}, "cpus", r"no platform 'cpus' \(did you mean cpu\?\); there are gpu, cpu"),
        ({}, "cpu", "no platform 'cpu'; it has none"),
        ({"platforms": ["cpu"]}, None, r"platforms wants a mapping .* found \['cpu'\]"),
        ({"platforms": {"cpu": {"step": 3}}}, None, r"unknown key step \(did you mean steps\?\)"),
        ({"gpus": 0}, None, "gpus wants at least 1, found 0"),
    ],
)
def test_what_is_wrong_is_named(recipe_file, changes, platform, message):
    with pytest.raises(RecipeError, match=message):
        load(recipe_file(**changes), platform)


def test_a_variable_of_the_shell_is_filled_in_or_missed_by_name(recipe_file, monkeypatch):
    path = recipe_file(env={"MODELS": "${oc.env:MODEL_DIR}/x"}, overrides=["data=${oc.env:DATA}", "a=${oc.env:LEFT,b}"])
    monkeypatch.setenv("MODEL_DIR", "/models")
    monkeypatch.delenv("DATA", raising=False)
    with pytest.raises(RecipeError, match=r"overrides: .*wants the environment variable DATA, which is not set"):
        plan_runs(load(path), path.parent, Path("/out"))
    monkeypatch.setenv("DATA", "/data")
    plan = plan_runs(load(path), path.parent, Path("/out"))[0]
    assert {"data=/data", "a=${oc.env:LEFT,b}"} <= set(plan.command)  # with a default it is hydra's own
    assert plan.env["MODELS"] == "/models/x"
