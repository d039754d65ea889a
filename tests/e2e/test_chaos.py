"""Processes of runs are killed at random moments: every prompt is trained once all the same, and nothing hangs.

test_tail_batching_killed_servers.py kills the servers and engines.
"""

import json
import subprocess

import pytest

from rl_accel.lab.bench.chaos import VICTIMS

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1500)]


@pytest.mark.parametrize("engine", ["hf_cpu"], indirect=True, scope="module")
def test_every_prompt_is_trained_once_whatever_dies(repo, clean_environment, engine, tmp_path):
    recipe = repo / "examples" / "verl_tail_batching"
    command = [engine.python, "-m", "rl_accel", "bench", "chaos", str(recipe), "--out", str(tmp_path)]
    command += ["--first-seed", "16", "--schedules", "2"]  # of two kills each
    done = subprocess.run(command, env=clean_environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "chaos.json").read_text())
    assert {kill["victim"] for result in results for kill in result["kills"]} == VICTIMS.keys() - {"engine", "server"}
    assert [result["launches"] for result in results] == [1, 2], (
        "a dead trainer ends a run, a dead store, agent-loop worker or reward worker does not"
    )
