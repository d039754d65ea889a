"""Tests verl's real reward workers in a real Ray job while processes are killed and calls cancelled, and the metrics of it.

In make test, tests/e2e/test_reward_timeout.py kills such processes under the real trainer.
"""

import asyncio
import contextlib
import os
from collections import Counter

import psutil
import pytest
import ray
from verl.experimental.reward_loop.reward_loop import RewardLoopManager

from rl_accel.integrations.ray import reward_anchors
from rl_accel.integrations.verl.reward_worker_proxy import proxies

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.usefixtures("job")]

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


def kill_graders(worker):
    """SIGKILL to the processes that run reward functions for a reward worker; return their number."""
    below = psutil.Process(ray.get(worker.__ray_call__.remote(lambda _: os.getpid()))).children(recursive=True)
    graders = [process for process in below if "rl_accel/reward/worker" in str(process.as_dict(["cmdline"]))]
    for grader in graders:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends with its parent
            grader.kill()
    psutil.wait_procs(graders, 20)
    return len(graders)


def test_scoring_goes_on_whatever_is_killed(configure, responses, kill, model_folder, tmp_path):
    flags = {"maximum": 300.0, "minimum": 0.5, "min_correct": 1, "workers": 2}
    keys = {"actor_rollout_ref.model.path": str(model_folder), "reward.num_workers": 2}
    config = configure(GRADED, flags, keys)
    handles = list(RewardLoopManager(config).reward_loop_worker_handles)
    workers, collect = proxies(handles, config), reward_anchors.Collector()

    async def score(*texts, **columns):
        rows = enumerate(responses(*texts, **columns))
        scored = await asyncio.gather(*(workers[number % 2].compute_score.remote(row) for number, row in rows))
        return [item["reward_score"] for item in scored]

    async def numbers(wanted):
        """Return what is counted from now until ``wanted`` holds of it."""
        total = Counter()
        async with asyncio.timeout(60):
            while not wanted(total):
                await asyncio.sleep(0.5)
                result = await asyncio.to_thread(collect, 1, {})
                known = total["anchors"]
                total.update({name.removeprefix("reward_timeout/"): value for name, value in result.items()})
                total["anchors"] = result.get("reward_timeout/anchors", known)
        return total

    async def main():
        assert await score("7", "8", "7") == [1.0, 0.0, 1.0]
        taught = await numbers(lambda total: total["executions"] >= 3)
        assert (taught["executions"], taught["correct"], taught["anchors"]) == (3, 2, 1)
        assert await score("7", validation=True) == [1.0]
        unseen = await numbers(lambda total: total["eval_executions"] >= 1)
        assert (unseen["eval_executions"], unseen["executions"]) == (1, 0), "a validation teaches nothing"

        assert sum(map(kill_graders, handles)) > 0
        assert await score("7", "8") == [1.0, 0.0], "after graders"
        kill(ray.get_actor(reward_anchors.store_name()))
        assert await score("7", "8") == [1.0, 0.0], "after the store"
        for handle in handles:
            kill(handle)
        assert await score("7", "8", "7", "8") == [1.0, 0.0, 1.0, 0.0], "after reward workers"
        lost = await numbers(lambda n: n["reward_workers_lost"] >= 2 and n["executions"] >= 4 and n["anchors"])
        assert (lost["reward_workers_lost"], lost["store_restarts"]) == (2, 1)
        assert lost["anchors"] == 1, "back from its file"

        (hangs,) = responses("hang", raw_prompt=[{"role": "user", "content": "new"}])
        hanging = asyncio.create_task(workers[0].compute_score.remote(hangs))
        async with asyncio.timeout(60):
            while not (tmp_path / "pid").exists():
                await asyncio.sleep(0.05)
        pid = int((tmp_path / "pid").read_text())
        hanging.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await hanging
        async with asyncio.timeout(60):  # its limit is 300 seconds
            while psutil.pid_exists(pid):
                await asyncio.sleep(0.05)
        assert await score("7") == [1.0], "after a cancellation"

    asyncio.run(main())
