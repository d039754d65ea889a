"""Script of test_sampler.py: samples from a real TransferQueue, stock and patched, and prints the measurements as JSON."""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import ray
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from rl_accel.features import SamplerFlags
from rl_accel.patches.verl.sampler import SWITCHES
from rl_accel.telemetry import metrics

pauses = []


class Seen(ReplayBuffer):
    """verl's buffer, which notes every interval it is told to sleep for."""

    def __setattr__(self, name, value):
        if name == "poll_interval" and "poll_interval" in vars(self):
            pauses.append(value)
        super().__setattr__(name, value)


def put(numbers, status):
    keys = [f"u{n}" for n in numbers]
    for at in range(0, len(keys), 2000):
        tag = {"is_prompt": True, "status": status, "global_steps": 1}
        some = keys[at : at + 2000]
        tq.kv_batch_put(keys=some, partition_id="train", tags=[tag] * len(some))


def cpu_share(seconds):
    """Share of one core that this process and those that keep the queue's keys take while this thread sleeps for ``seconds``."""
    family = psutil.Process().children(recursive=True)
    keepers = [p for p in family if "TransferQueueController" in str(p.as_dict(["cmdline"]))]
    assert keepers, [p.name() for p in family]
    before, began = [p.cpu_times()[:2] for p in (psutil.Process(), *keepers)], time.perf_counter()
    time.sleep(seconds)
    after = [p.cpu_times()[:2] for p in (psutil.Process(), *keepers)]
    return (sum(map(sum, after)) - sum(map(sum, before))) / (time.perf_counter() - began)


def sample(keys, rollout_s):
    """Sample one prompt that finishes after ``rollout_s`` seconds while ``keys`` - 1 others go on running."""
    buffer = Seen("sync", OmegaConf.create({}), None, "drop", OmegaConf.create({}))
    put(range(keys), "running")
    tq.kv_batch_put(keys=["u0_0_0"], partition_id="train", tags=[{"seq_len": 1}])

    def finish():
        share = cpu_share(rollout_s)
        put([0], "finished")
        return share

    begun = time.perf_counter()
    buffer._sync_metadata_from_transfer_queue()
    poll_s = time.perf_counter() - begun
    with ThreadPoolExecutor() as pool:
        rollout = pool.submit(finish)
        buffer.sample(1, "train", 1)
    tq.kv_clear(partition_id="train", keys=["u0_0_0"])
    return {"poll_s": poll_s, "cpu_share": rollout.result()}


def main(keys, seconds):
    (patch,) = SWITCHES
    patch.apply(SamplerFlags(enable=True))  # in a buffer of the user's it must be named
    put(range(keys), "running")
    results = {"idle": cpu_share(seconds / 2)}
    results["large"] = sample(keys, seconds)
    results["large"]["polls"] = metrics.drain()["rl_accel/sampler/polls"]
    tq.kv_clear(partition_id="train", keys=[f"u{n}" for n in range(1, keys)])

    pauses.clear()
    seen, polls_s = [], []
    for _ in range(40):  # as many as a slow machine needs
        polls_s.append(sample(64, 0.5)["poll_s"])
        seen = [pause for pause in pauses if pause != 2.0]  # 2.0 is the stock value being put back
        if len(seen) > 50:
            break
    results["small"] = {
        "pauses": seen,
        "poll_s": max(polls_s),
        "seconds_saved": metrics.drain()["rl_accel/sampler/seconds_saved"],
    }
    print(json.dumps(results))


if __name__ == "__main__":
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(address="local", num_cpus=4, _temp_dir=sys.argv[1], **quiet)
    try:
        tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
        main(int(sys.argv[2]), float(sys.argv[3]))
    finally:
        try:
            tq.close()
        finally:
            ray.shutdown()
