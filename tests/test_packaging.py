"""Tests that wheel and editable install hold the same packages, and that the wheel works outside the checkout."""

import json
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest

import rl_accel.integrations
import rl_accel.patches
import verl_on_cpu

FOLDERS = ("rl_accel", "patches", "integrations")


def test_every_module_lies_in_a_package_and_the_editable_install_is_this_checkout(repo):
    modules = [path for folder in FOLDERS for path in (repo / folder).rglob("*.py")]
    assert [path for path in modules if not (path.parent / "__init__.py").exists()] == []
    assert Path(rl_accel.patches.__file__).resolve().parent == repo / "patches"
    assert Path(rl_accel.integrations.__file__).resolve().parent == repo / "integrations"
    assert Path(verl_on_cpu.__file__).parent == repo / "examples" / "verl_on_cpu" / "verl_on_cpu"
    assert tomllib.loads((repo / "pyproject.toml").read_text())["project"]["version"] == rl_accel.__version__


def test_a_bare_checkout_imports_without_an_installation(repo, python):
    done = python(
        f"""
        import sys
        sys.path.insert(0, {str(repo)!r})
        import rl_accel.integrations, rl_accel.patches
        print(rl_accel.integrations.__file__, rl_accel.patches.__file__)
        """
    )
    assert done.stdout.split() == [str(repo / "rl_accel" / f / "__init__.py") for f in ("integrations", "patches")]


@pytest.mark.full
def test_the_wheel_holds_all_modules_and_only_them(wheel, repo):
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name == f"rl_accel-{rl_accel.__version__}-py3-none-any.whl", "README names this file"
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"rl_accel"}
    assert "rl_accel/patches/verl/gae.py" in names
    assert "rl_accel/integrations/verl/plugin.py" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    tracked = {str(path.relative_to(repo)) for folder in FOLDERS for path in (repo / folder).rglob("*.py")}
    in_wheel = {name if name.startswith("rl_accel/") else f"rl_accel/{name}" for name in tracked}
    assert in_wheel <= set(names)


@pytest.fixture
def run(wheel_python, wheel_environment, tmp_path):
    """``run(*words, **environment)``: the output of the Python of the wheel's environment, outside the checkout."""

    def run(*words, **environment):
        command, env = [str(wheel_python), *words], {**wheel_environment, **environment}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.full
def test_the_wheel_works_outside_the_checkout_and_verl_finds_its_plugin(run, wheel_python):
    script = """import sys, rl_accel, rl_accel.patches, rl_accel.integrations, verl
for module in (rl_accel, rl_accel.patches, sys.modules["rl_accel.integrations.verl.plugin"]):
    print(module.__file__)"""
    paths = run("-c", script).splitlines()[-3:]
    assert all(str(wheel_python.parent.parent) in path for path in paths), paths


@pytest.mark.full
def test_doctor_from_the_wheel_says_what_works_and_without_verl_that_it_is_absent(run, wheel_python, tmp_path):
    stdout = run(str(wheel_python.parent / "rl-accel"), "doctor", "--json")
    document = json.loads(stdout[stdout.index("{") :])
    assert document["versions"]["verl"] == "0.9.1"
    assert {check["switch"]: check["verdict"] for check in document["checks"]}["verl.gae"] == "works"
    assert document["backends"]["numba"] is None
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules.update(verl=None, ray=None)\n")
    stdout = run("-m", "rl_accel", "doctor", "--json", PYTHONPATH=str(tmp_path), SLIME_ROOT="")
    assert {check["verdict"] for check in json.loads(stdout)["checks"]} == {"absent"}


@pytest.mark.slow
def test_help_of_no_command_imports_a_large_library(python):
    """Each takes less than a second of processor time; torch alone takes three."""
    python(
        """
        import sys
        import click
        from rl_accel.__main__ import cli

        context = click.Context(cli)
        commands = [cli.get_command(context, name) for name in cli.list_commands(context)]
        assert len(commands) > 8 and all(commands)
        heavy = {"torch", "scipy", "pandas", "matplotlib", "transformers", "verl", "ray"} & sys.modules.keys()
        assert not heavy, heavy
        """
    )
