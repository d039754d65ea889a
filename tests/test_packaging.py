"""The wheel and the editable install hold the same packages, and a wheel works away from the checkout."""

import json
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest

FOLDERS = ("rl_accel", "patches", "integrations")


def test_every_module_lies_in_a_package(repo):
    modules_without_package = {
        str(path.relative_to(repo))
        for folder in FOLDERS
        for path in (repo / folder).rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    }
    assert modules_without_package == set()


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


def test_the_version_is_written_once_in_two_places(repo):
    import rl_accel

    assert tomllib.loads((repo / "pyproject.toml").read_text())["project"]["version"] == rl_accel.__version__


@pytest.mark.slow
def test_the_wheel_holds_all_modules_and_only_them(wheel, repo):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"rl_accel"}
    assert "rl_accel/patches/verl/gae.py" in names
    assert "rl_accel/integrations/verl/plugin.py" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    tracked = {str(path.relative_to(repo)) for folder in FOLDERS for path in (repo / folder).rglob("*.py")}
    in_wheel = {name if name.startswith("rl_accel/") else f"rl_accel/{name}" for name in tracked}
    assert in_wheel <= set(names)


@pytest.mark.slow
def test_the_wheel_works_outside_the_checkout(wheel_python, wheel_environment, tmp_path):
    script = (
        "import rl_accel, rl_accel.patches, rl_accel.integrations; print(rl_accel.__file__, rl_accel.patches.__file__)"
    )
    done = subprocess.run(
        [str(wheel_python), "-c", script],
        cwd=tmp_path,
        env=wheel_environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(str(wheel_python.parent.parent) in path for path in done.stdout.split())


@pytest.mark.slow
def test_doctor_and_plugin_discovery_from_the_wheel(wheel_python, wheel_environment, tmp_path):
    doctor = subprocess.run(
        [str(wheel_python.parent / "rl-accel"), "doctor", "--json"],
        cwd=tmp_path,
        env=wheel_environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert doctor.returncode == 0, doctor.stderr
    found = json.loads(doctor.stdout[doctor.stdout.index("{") :])
    assert found["versions"]["verl"] == "0.9.1"
    assert {check["patch"]: check["verdict"] for check in found["checks"]}["verl.gae"] == "works"
    assert found["backends"]["numba"] is None

    loaded = subprocess.run(
        [str(wheel_python), "-c", "import sys, verl; print(sys.modules['rl_accel.integrations.verl.plugin'].__file__)"],
        cwd=tmp_path,
        env=wheel_environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert str(wheel_python.parent.parent) in loaded.stdout, loaded.stderr


@pytest.mark.slow
def test_the_wheel_alone_says_that_verl_is_absent(wheel_python, wheel_environment, tmp_path):
    hidden = tmp_path / "hide"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('verl', 'ray'): raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hide())\n"
    )
    done = subprocess.run(
        [str(wheel_python), "-m", "rl_accel", "doctor", "--json"],
        cwd=tmp_path,
        env={**wheel_environment, "PYTHONPATH": str(hidden), "SLIME_ROOT": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    verdicts = {check["verdict"] for check in json.loads(done.stdout)["checks"]}
    assert verdicts == {"absent"}


def test_the_editable_install_is_this_checkout(repo):
    import rl_accel.integrations
    import rl_accel.patches

    assert Path(rl_accel.patches.__file__).resolve().parent == repo / "patches"
    assert Path(rl_accel.integrations.__file__).resolve().parent == repo / "integrations"
