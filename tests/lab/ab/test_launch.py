"""Tests ``--launch``: a shell runs the printed script, with a stand-in for Slurm."""

import json
import os
import shlex
import subprocess
import sys

import pytest

SBATCH = r"""#!/bin/bash
# runs what is wrapped at once, notes what it was asked for, and answers as sbatch --parsable in a federation
printf '%s\n' "$*" >> "$SLURM_NOTES"
for word in "$@"; do case $word in --wrap=*) wrapped=${word#--wrap=};; --output=*) log=${word#--output=};; esac; done
bash -c "$wrapped" >> "$log" 2>&1
echo "$((100 + $(wc -l < "$SLURM_NOTES")));cluster"
"""


@pytest.fixture
def shell(tmp_path):
    """``shell(script, ...)`` runs it in bash, where ``rl-accel`` is this tree's and ``sbatch`` is the one above."""
    folder = tmp_path / "bin"
    folder.mkdir()
    programs = {"sbatch": SBATCH, "rl-accel": f'#!/bin/bash\nexec {sys.executable} -m rl_accel "$@"\n'}
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    notes = tmp_path / "sbatch.txt"

    def run(script):
        env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_NOTES": str(notes), "COLUMNS": "200"}
        return subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)

    run.notes = notes
    return run


@pytest.mark.slow
def test_every_run_is_a_job_and_the_last_job_reports(recipe_file, call_ab, shell, tmp_path):
    prepare = ["python", "-c", "open('prepared.txt', 'a').write('once ')"]
    path = recipe_file(steps=2, gpus=4, timeout_s=120, prepare=prepare)
    out = tmp_path / "out of it"
    script = call_ab(path, "--out", out, "--launch", "slurm")
    done = shell(script)
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = shell.notes.read_text().splitlines()
    names = ["stock-seed0", "accelerated-seed0", "report"]
    assert [job.split("--job-name=toy-")[1].split()[0] for job in jobs] == names
    assert all("--gpus-per-node=4 --time=12 " in job for job in jobs[:-1])
    assert "--dependency=afterany:101:102 " in jobs[-1]
    assert (out / "report.html").exists()
    assert (path.parent / "prepared.txt").read_text() == "once "

    (out / "stock-seed0" / "run.json").unlink()  # as if its node had died
    kept = {name: (out / name / "run.json").stat().st_mtime_ns for name in names[:-1] if name != "stock-seed0"}
    assert shell(script).returncode == 0
    assert {name: (out / name / "run.json").stat().st_mtime_ns for name in kept} == kept
    assert json.loads((out / "stock-seed0" / "run.json").read_text())["status"] == "done"
    assert "kept from an earlier call" in (out / "accelerated-seed0.slurm.log").read_text()


def test_a_job_of_ray_carries_the_environment_that_actors_need(recipe_file, call_ab, tmp_path, monkeypatch):
    monkeypatch.setenv("MODELS", "/models")
    changes = {"overrides": ["m=${oc.env:MODELS}"], "platforms": {"gpu": {"gpus": 8, "nodes": 2}}}
    path = recipe_file(env={"A": "b c", "GONE": None}, **changes)
    script = call_ab(path, "--out", tmp_path / "out", "--launch", "ray", "--platform", "gpu")
    words = shlex.split(script.splitlines()[2])
    assert words[:3] == ["ray", "job", "submit"]
    env = json.loads(words[3].removeprefix("--runtime-env-json="))["env_vars"]
    log = str(tmp_path / "out/stock-seed0/metrics.jsonl")
    assert env == {"MODELS": "/models", "A": "b c", "VERL_FILE_LOGGER_PATH": log}
    call = f"rl-accel ab {path} --out {tmp_path}/out --platform gpu --only stock-seed0"
    assert shlex.join(words[5:]).startswith(call)
    assert words[words.index("--ray-address") + 1] == "auto"
    assert "wants nodes: 1, found 2" in call_ab(path, "--launch", "slurm", code=None)


def test_a_single_run_joins_a_named_cluster_fails_by_its_exit_code_and_wants_a_name(recipe_file, call_ab, tmp_path):
    out, path = tmp_path / "out", recipe_file(steps=1, arms={"stock": {}, "broken": {"overrides": ["fail_at=1"]}})
    output = call_ab(path, "--out", out, "--only", "stock-seed7", code=None)
    assert "--only wants one of prepare, stock-seed0, broken-seed0, found 'stock-seed7'" in " ".join(output.split())
    call_ab(path, "--out", out, "--only", "broken-seed0", code=1)
    call_ab(path, "--out", out, "--only", "stock-seed0", "--ray-address", "10.0.0.1:6379")
    assert json.loads((out / "stock-seed0/run.json").read_text())["env"]["RAY_ADDRESS"] == "10.0.0.1:6379"
