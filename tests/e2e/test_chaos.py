"""Kills processes of runs at random moments. Every prompt is still trained once, and nothing hangs.

test_tail_batching_killed_servers.py kills servers and engines that are started again within the run; those of SGLang are not.
"""

import json
import subprocess

import pytest

pytestmark = [pytest.mark.full, pytest.mark.timeout(2400)]


@pytest.mark.parametrize(
    ("engine", "example", "seed", "victims"),
    [
        ("hf_cpu", "verl_tail_batching", 16, [["anchor store", "agent-loop worker"], ["trainer", "reward worker"]]),
        pytest.param("sglang", "verl_sglang_cpu", 1, [["server", "engine"]], marks=pytest.mark.sglang),
    ],
    indirect=["engine"],
    scope="module",
)
def test_every_prompt_is_trained_once_whatever_dies(repo, clean_environment, engine, example, seed, victims, tmp_path):
    """Two kills in each schedule. Only a dead trainer ends a run, and on SGLang a dead engine or server."""
    command = [engine.python, "-m", "rl_accel", "bench", "chaos", str(repo / "examples" / example)]
    command += ["--out", str(tmp_path), "--first-seed", str(seed), "--schedules", str(len(victims))]
    done = subprocess.run(command, env=clean_environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "chaos.json").read_text())
    assert [[kill["victim"] for kill in result["kills"]] for result in results] == victims
    ends = {"trainer"} if engine.name == "hf_cpu" else {"trainer", "engine", "server"}
    for result in results:
        assert result["launches"] == 1 + sum(kill["victim"] in ends for kill in result["kills"])
