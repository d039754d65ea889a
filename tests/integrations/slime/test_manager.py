"""slime's real RolloutManager actor, switched to tail batching by the one YAML, killed and resumed."""

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None, reason="sglang, which slime's parser imports, is absent"
    ),
]


@pytest.fixture
def run_manager(slime_root, serve, router, model_folder, prompts_file, clean_environment, short_tmp):
    """``run_manager("tail")`` returns the lines of JSON that ``manager.py`` prints."""

    def run(what):
        plugins = Path(__file__).with_name("plugins")
        environment = {**clean_environment, "PYTHONPATH": os.pathsep.join([str(slime_root), str(plugins)])}
        script = Path(__file__).with_name("manager.py")
        url = router(serve("--seconds-per-step", "0.002", "--max-running-requests", "256", "--context-length", "512"))
        done = subprocess.run(
            [sys.executable, str(script), url, str(model_folder), str(prompts_file), str(short_tmp), what],
            env=environment,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    return run


def test_the_manager_trains_every_prompt_once_also_after_a_resume(run_manager, short_tmp):
    lines = run_manager("tail")
    assert [line["rollout"] for line in lines] == [0, 1, 2, 2, 3, 4, 5]
    assert all(line["samples"] == line["unique"] == 32 for line in lines)
    ledger = (short_tmp / "checkpoints/rollout/tail_batching/ledger.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in ledger]
    assert [step["step"] for step in steps] == list(range(6))
    trained = Counter(prompt_id for step in steps for prompt_id in step["trained"])
    assert trained == Counter({f"1:{row}": 1 for row in range(1, 49)})


def test_the_manager_logs_what_grading_did_and_survives_the_loss_of_the_store(run_manager, short_tmp):
    *rollouts, evaluation = run_manager("rewards")
    totals = Counter()
    for line in rollouts:  # while the store is away the numbers of a rollout come with the next, and some of them twice
        totals.update(
            {name: line.get(f"rl_accel/reward_timeout/{name}", 0) for name in ("executions", "timeouts", "errors")}
        )
    assert (totals["timeouts"], totals["errors"]) == (4, 4)
    assert totals["executions"] >= 96
    assert rollouts[0]["rl_accel/reward_timeout/anchors"] >= 6
    assert rollouts[2]["rl_accel/reward_timeout/anchors"] >= 20, "the new store knows what was known"
    assert all("rollout/response_len/mean" in line for line in rollouts), "slime's own numbers are there"
    assert evaluation["eval/few"] > 0
    saved = json.loads((short_tmp / "checkpoints/rl_accel_reward_anchors.json").read_text())
    assert len(saved["anchors"]) >= 20
