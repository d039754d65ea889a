"""Tests that the functions by which stages and waits are recognised exist in the installed frameworks."""

import ast
import importlib.util
import threading
from pathlib import Path

import pytest

from rl_accel.features import StallFlags
from rl_accel.integrations.slime import stall as on_slime
from rl_accel.integrations.verl import stall as on_verl


def functions_of(file):
    """Returns the qualified names of the functions and methods in ``file``."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if hasattr(part, "args")}
    return names


def absent(places, root):
    """Returns the places that are not in the packages below the folder ``root``."""
    missing = []
    for module, functions in places.items():
        file = root / (module.replace(".", "/") + ".py")
        if not file.exists():
            file = root / module.replace(".", "/") / "__init__.py"
        missing += [f"{module}:{name}" for name in functions if name != "*" and name not in functions_of(file)]
    return missing


def test_the_places_of_verl_exist(repo):
    root = Path(importlib.util.find_spec("verl").origin).parents[1]
    theirs = {
        module: places for module, places in on_verl.PLACES.items() if not module.startswith(("rl_accel.", "__main__"))
    }
    mains = {f"verl.trainer.main_ppo{version}" for version in ("", "_v0")}
    others = {module: places for module, places in theirs.items() if module not in mains}
    legacy = "verl.trainer.ppo.ray_trainer:RayPPOTrainer"  # whose method fit has both in its own body
    assert absent(others, root) == [f"{legacy}._compute_advantage"]
    assert {name for module in mains for name in functions_of(root / f"{module.replace('.', '/')}.py")} >= {
        "TaskRunnerV1.run",
        "TaskRunner.run",
    }
    own = {module: places for module, places in on_verl.PLACES.items() if module.startswith("rl_accel.")}
    assert own
    assert absent(own, repo) == []


def test_the_places_of_slime_exist(slime_root):
    assert absent(on_slime.PLACES, slime_root) == []


@pytest.mark.parametrize("name", ["verl", "slime"])
def test_the_switch_of_each_framework_starts_and_ends_one_thread(name):

    (switch,) = {"verl": on_verl, "slime": on_slime}[name].SWITCHES
    before = threading.active_count()
    switch.register(StallFlags())
    assert threading.active_count() == before + 1
    assert type(switch.find()).__module__ == switch.owner
    switch.unregister()
    assert threading.active_count() == before
    assert switch.find() is None
