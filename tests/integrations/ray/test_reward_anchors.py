"""Anchors reach other processes of a real Ray job, and survive the death of what keeps them."""

import asyncio
import json
import subprocess
import sys

import pytest

from rl_accel.integrations.ray import reward_anchors
from rl_accel.reward.anchor_store import AnchorStore, Replica

pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, signal, sys, time
import ray
from rl_accel.integrations.ray import reward_anchors
from rl_accel.reward.anchor_store import Replica

ray.init(address=sys.argv[1])
PATH = sys.argv[2]

@ray.remote(num_cpus=0)
class Worker:
    def __init__(self):
        self.replica = Replica()
        self.store_client = reward_anchors.StoreClient(self.replica, PATH)

    async def learn(self, key, seconds):
        self.replica.record(key, seconds, seconds, correct=True)
        self.replica.count("executions")
        self.store_client.use()

    async def known(self):
        self.store_client.use()
        return {key: list(anchor) for key, anchor in self.replica.timeout.anchors().items()}

def until(ready, seconds=60):
    end = time.time() + seconds
    while time.time() < end:
        found = ready()
        if found:
            return found
        time.sleep(0.2)
    raise SystemExit(f"not within {seconds} s")

def both_know(count):
    found = ray.get([one.known.remote(), other.known.remote()])
    return found if found[0] == found[1] and len(found[0]) == count else None

def store_holds(count):
    try:
        found = ray.get(ray.get_actor(reward_anchors.NAME).exchange.remote(reward_anchors.AnchorDelta()), timeout=5).anchors
    except (ray.exceptions.RayError, ValueError):  # dead, or none of that name yet
        return None
    return {key: list(anchor) for key, anchor in found.items()} if len(found) == count else None

one, other = Worker.remote(), Worker.remote()
report = {}
ray.get(one.learn.remote("a", 1.0))
report["shared"] = until(lambda: both_know(1))[1]

handle = ray.get_actor(reward_anchors.NAME)
report["counts"] = ray.get(handle.take_counts.remote())[1]
report["saved"] = json.load(open(PATH))["anchors"]

ray.get(other.learn.remote("b", 2.0))
until(lambda: both_know(2))
"""

KILLED = """
victim = ray.get(ray.get_actor(reward_anchors.NAME).__ray_call__.remote(lambda store: os.getpid()))
os.kill(victim, signal.SIGKILL)
until(lambda: not os.path.exists(f"/proc/{victim}"))
ray.get(one.learn.remote("c", 3.0))
report["after"] = until(lambda: both_know(3))[0]
report["store"] = until(lambda: store_holds(3))
"""
END = "\nprint(json.dumps(report))\nray.shutdown()\n"


@pytest.fixture
def run(ray_address, clean_environment, tmp_path):
    """``run(script)`` runs a script as a job of the cluster and returns its report."""

    def start(script):
        words = [sys.executable, "-c", script + END, ray_address, str(tmp_path / "anchors.json")]
        done = subprocess.run(words, env=clean_environment, capture_output=True, text=True, timeout=300, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return start


def test_anchors_are_shared_saved_and_outlive_the_ledgers_process(run):
    found = run(SCRIPT + KILLED)
    assert found["shared"] == {"a": [1.0, 1.0, 1]}
    assert found["counts"]["executions"] == 1.0
    assert found["counts"]["anchors"] == 1.0
    assert found["saved"] == {"a": [1.0, 1.0, 1]}
    everything = {"a": [1.0, 1.0, 1], "b": [2.0, 2.0, 1], "c": [3.0, 3.0, 1]}
    assert found["after"] == found["store"] == everything


def test_the_store_outlives_a_handle_that_is_let_go(run):
    script = """
import gc, json, sys, time
import ray
from rl_accel.integrations.ray import reward_anchors
from rl_accel.features import RewardTimeoutFlags

ray.init(address=sys.argv[1])
handle = reward_anchors.anchor_store(None, RewardTimeoutFlags())
incarnation = ray.get(handle.take_counts.remote())[0]
del handle
gc.collect()
time.sleep(2)
report = {"same": ray.get(reward_anchors.anchor_store(None, RewardTimeoutFlags()).take_counts.remote())[0] == incarnation}
"""
    assert run(script)["same"]


def test_the_ledgers_owner_may_die(run):
    """Whoever asked first owns the store; with that worker the store goes, and the next to ask makes another."""
    script = """
ray.kill(one)
ray.get(other.learn.remote("b", 2.0))
report["store"] = until(lambda: store_holds(2))
"""
    found = run(SCRIPT + script)
    assert found["store"] == {"a": [1.0, 1.0, 1], "b": [2.0, 2.0, 1]}


def test_changes_that_a_slow_store_takes_long_over_are_counted_once(monkeypatch):
    store = AnchorStore()

    class Exchange:
        async def remote(self, delta):
            await asyncio.sleep(0.3)
            return store.exchange(delta)

    class Handle:
        exchange = Exchange()

    monkeypatch.setattr(reward_anchors, "anchor_store", lambda path, flags: Handle())
    monkeypatch.setattr(reward_anchors.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(reward_anchors, "_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(reward_anchors, "EXCHANGE_SECONDS", 0.01)

    async def main():
        replica = Replica()
        line = reward_anchors.StoreClient(replica, None)
        replica.record("a", 1.0, 1.0, correct=True)
        replica.count("executions")
        line.use()
        await asyncio.sleep(1.0)
        return replica.timeout.get("a")

    assert asyncio.run(main()) == (1.0, 1.0, 1)
    counts = store.take_counts()
    assert counts["executions"] == 1.0
    assert counts["store_unreachable"] > 0
