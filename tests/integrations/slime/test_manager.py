"""Tests slime's real RolloutManager actor with features from one YAML file, killed and resumed."""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(slime_root, serve, router, model_folder, prompts_file, clean_environment):
    """What ``manager.py`` prints, and under ``folder`` the folder that it has written to."""
    pytest.importorskip("sglang", reason="sglang, which slime's parser imports, is absent")
    here = Path(__file__).parent
    path = [str(slime_root), str(here / "plugins"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**clean_environment, "PYTHONPATH": os.pathsep.join(path)}
    url = router(serve())
    with tempfile.TemporaryDirectory(prefix="rla", dir="/tmp", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, here / "manager.py", url, model_folder, prompts_file, folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        yield {**json.loads(done.stdout.splitlines()[-1]), "folder": Path(folder)}


def test_the_manager_trains_every_prompt_once_also_after_a_resume(run):
    assert [line["rollout"] for line in run["tail"]] == [0, 1, 2, 2, 3, 4, 5]
    assert all(line["samples"] == line["unique"] == 32 for line in run["tail"])
    ledger = (run["folder"] / "tail/rollout/tail_batching/ledger.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in ledger]
    assert [step["step"] for step in steps] == list(range(6))
    trained = Counter(prompt_id for step in steps for prompt_id in step["trained"])
    assert trained == Counter({f"1:{row}": 1 for row in range(1, 49)})


def test_the_manager_logs_what_grading_did_and_survives_the_loss_of_the_store(run):
    *rollouts, evaluation = run["rewards"]

    def total(name):  # while the store is away the numbers of a rollout come with the next, and some of them twice
        return sum(line.get(f"rl_accel/reward_timeout/{name}", 0) for line in rollouts)

    assert (total("timeouts"), total("errors")) == (4, 4)
    assert total("executions") >= 96
    assert rollouts[0]["rl_accel/reward_timeout/anchors"] >= 6
    assert rollouts[2]["rl_accel/reward_timeout/anchors"] >= 20, "the new store knows what was known"
    assert all("rollout/response_len/mean" in line for line in rollouts), "slime's own numbers are there"
    assert evaluation["eval/few"] > 0
    saved = json.loads((run["folder"] / "rewards/rl_accel_reward_anchors.json").read_text())
    assert len(saved["anchors"]) >= 20
