"""verl's real reward workers in a real Ray job: killed, cancelled, and what the numbers say of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rl_accel

pytestmark = pytest.mark.slow

SCRIPT = """
import asyncio, contextlib, json, os, sys, time
import psutil, ray
from omegaconf import OmegaConf

folder, model = sys.argv[1:3]
ray.init(address="local", num_cpus=4, include_dashboard=False, _temp_dir=folder + "/r")

from hydra import compose, initialize_config_module
from rl_accel.features import RewardTimeoutFlags
from rl_accel.integrations.ray import reward_anchors
from rl_accel.integrations.verl.reward_timeout import wire
from rl_accel.integrations.verl.reward_worker_proxy import VALIDATION, proxies
from verl.experimental.reward_loop.reward_loop import RewardLoopManager

sys.path.insert(0, folder)
import data as made

with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", [
        f"actor_rollout_ref.model.path={model}", "reward.num_workers=2", f"trainer.default_local_dir={folder}/run",
        f"reward.custom_reward_function.path={folder}/graded.py"])
wire(config, RewardTimeoutFlags(enable=True, maximum=20.0, minimum=0.5, min_correct=1, workers=2))
manager = RewardLoopManager(config)
workers = proxies(manager.reward_loop_worker_handles, config)
collect, report = reward_anchors.Collector(), {}

def processes(name):
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            ours = process.pid != os.getpid() and process.environ().get("OF_THIS_TEST") == folder
            if ours and name in " ".join(process.cmdline()):
                found.append(process)
    return found

def kill(name):
    found = processes(name)
    for process in found:
        process.kill()
    psutil.wait_procs(found, 20)
    return len(found)

async def score(*texts, **columns):
    rows = made.rows(model, texts, **columns)
    return [item["reward_score"] for item in await asyncio.gather(*(
        workers[number % 2].compute_score.remote(row) for number, row in enumerate(rows)))]

async def numbers(wanted):
    total, end = {}, time.time() + 60
    while time.time() < end and not wanted(total):
        await asyncio.sleep(0.5)
        for name, value in (await asyncio.to_thread(collect, 1, {})).items():
            name = name.removeprefix("reward_timeout/")
            total[name] = value if name == "anchors" else total.get(name, 0) + value
    return total

async def main():
    report["before"] = await score("7", "8", "7")
    report["taught"] = await numbers(lambda total: total.get("executions", 0) >= 3)
    report["validation"] = await score("7", **{VALIDATION: True})
    report["unseen"] = await numbers(lambda total: total.get("eval_executions", 0) >= 1)

    report["graders killed"] = kill("rl_accel/reward/worker") > 0
    report["after graders"] = await score("7", "8")
    report["stores killed"] = kill("ray::AnchorStoreActor")
    report["after store"] = await score("7", "8")
    report["reward workers killed"] = kill("ray::RewardLoopWorker")
    report["after reward workers"] = await score("7", "8", "7", "8")
    report["lost"] = await numbers(
        lambda total: total.get("reward_workers_lost", 0) >= 2 and total.get("executions", 0) >= 4 and total.get("anchors"))

    hanging = asyncio.create_task(workers[0].compute_score.remote(made.rows(model, ["hang"], ground_truth="new")[0]))
    while not os.path.exists(folder + "/pid"):
        await asyncio.sleep(0.05)
    pid = int(open(folder + "/pid").read())
    hanging.cancel()
    began = time.time()
    with contextlib.suppress(asyncio.CancelledError):
        await hanging
    while psutil.pid_exists(pid) and time.time() < began + 15:
        await asyncio.sleep(0.05)
    report["seconds to die"] = time.time() - began
    report["after cancellation"] = await score("7")

asyncio.run(main())
open(folder + "/report.json", "w").write(json.dumps(report))
ray.shutdown()
"""
GRADED = """
import os, time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "hang":
        folder = os.path.dirname(os.path.abspath(__file__))
        open(folder + "/part", "w").write(str(os.getpid()))
        os.rename(folder + "/part", folder + "/pid")
        time.sleep(600)
    return float(solution_str == ground_truth)
"""
DATA = """
import numpy as np, torch
from tensordict import TensorDict
from transformers import AutoTokenizer
from verl.protocol import DataProto

def rows(model, texts, ground_truth="7", **columns):
    tokenizer, found = AutoTokenizer.from_pretrained(model), []
    for text in texts:
        answer = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        batch = TensorDict({"prompts": answer, "responses": answer, "attention_mask": torch.ones(1, 2 * answer.shape[1]).long()}, 1)
        row = {"data_source": "test", "reward_model": {"ground_truth": ground_truth}, "extra_info": {"index": 0}, **columns}
        arrays = {}
        for name, value in row.items():
            arrays[name] = np.empty(1, dtype=object)
            arrays[name][0] = value
        found.append(DataProto(batch=batch, non_tensor_batch=arrays))
    return found
"""


def test_scoring_goes_on_whatever_is_killed(short_tmp, clean_environment, model_folder):
    (short_tmp / "graded.py").write_text(GRADED)
    (short_tmp / "data.py").write_text(DATA)
    tree = str(Path(rl_accel.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(short_tmp), str(model_folder)],
        env={
            **clean_environment,
            "OF_THIS_TEST": str(short_tmp),
            "PYTHONPATH": os.pathsep.join((str(short_tmp), tree)),
        },
        capture_output=True,
        text=True,
        timeout=500,
        cwd=short_tmp,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((short_tmp / "report.json").read_text())
    assert found["before"] == [1.0, 0.0, 1.0]
    assert (found["taught"]["executions"], found["taught"]["correct"], found["taught"]["anchors"]) == (3, 2, 1)
    assert found["validation"] == [1.0]
    assert (found["unseen"]["eval_executions"], found["unseen"]["executions"]) == (1, 0), "a validation teaches nothing"
    assert found["graders killed"]
    assert found["after graders"] == found["after store"] == [1.0, 0.0]
    assert (found["stores killed"], found["reward workers killed"]) == (1, 2)
    assert found["after reward workers"] == [1.0, 0.0, 1.0, 0.0]
    assert found["lost"]["reward_workers_lost"] == 2
    assert found["lost"]["store_restarts"] == 1
    assert found["lost"]["anchors"] == 1, "back from its file"
    assert found["seconds to die"] < 5
    assert found["after cancellation"] == [1.0]
