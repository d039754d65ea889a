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


def test_the_manager_trains_every_prompt_once_also_after_a_resume(
    slime_root, serve, model_folder, prompts_file, clean_environment, short_tmp
):
    plugins = Path(__file__).with_name("plugins")
    environment = {**clean_environment, "PYTHONPATH": os.pathsep.join([str(slime_root), str(plugins)])}
    script = Path(__file__).with_name("manager.py")
    url = serve("--seconds-per-step", "0.002", "--max-running-requests", "256", "--context-length", "512")
    done = subprocess.run(
        [sys.executable, str(script), url, str(model_folder), str(prompts_file), str(short_tmp)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["rollout"] for line in lines] == [0, 1, 2, 2, 3, 4, 5]
    assert all(line["samples"] == line["unique"] == 32 for line in lines)
    ledger = (short_tmp / "checkpoints/rollout/tail_batching/ledger.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in ledger]
    assert [step["step"] for step in steps] == list(range(6))
    trained = Counter(prompt_id for step in steps for prompt_id in step["trained"])
    assert trained == Counter({f"1:{row}": 1 for row in range(1, 49)})
