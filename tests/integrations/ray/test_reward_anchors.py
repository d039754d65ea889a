"""Tests that anchors reach other processes of a real Ray job, and survive the death of the actor that stores them."""

import asyncio
import gc
import json
import sys
import time
from types import SimpleNamespace

import pytest
import ray

from rl_accel.features import RewardTimeoutFlags
from rl_accel.integrations.ray import reward_anchors
from rl_accel.reward.adaptive_timeout import AnchorStore, LocalAnchors, Message
from rl_accel.reward.graders import Graders
from rl_accel.reward.limited_executor import ExecutionResult, Limits
from rl_accel.reward.scores import Scores

pytestmark = pytest.mark.slow


@pytest.fixture
def job(ray_address, monkeypatch):
    """Makes this process the driver of a new job, whose actors get code of this module by value."""
    module = sys.modules[__name__]
    monkeypatch.setattr(reward_anchors, "_handles", {})
    ray.cloudpickle.register_pickle_by_value(module)
    ray.init(address=ray_address)
    yield
    ray.shutdown()
    ray.cloudpickle.unregister_pickle_by_value(module)


class Worker:
    def __init__(self, path):
        self.anchors = LocalAnchors()
        self.store_client = reward_anchors.StoreClient(self.anchors, path)

    async def learn(self, key, seconds):
        self.anchors.record(key, seconds, seconds, correct=True)
        self.anchors.count("executions")
        self.store_client.use()

    async def known(self):
        self.store_client.use()
        return dict(self.anchors.timeout.anchors())


def all_know(count, *workers):
    """What all of ``workers`` know, if that is the same ``count`` anchors."""
    first, *others = ray.get([worker.known.remote() for worker in workers])
    return first if len(first) == count and all(known == first for known in others) else None


def store_holds(count):
    try:
        store = ray.get_actor(reward_anchors.store_name())
        result = ray.get(store.exchange.remote("test", Message({}, {}, {}), True), timeout=5).anchors
    except (ray.exceptions.RayError, ValueError):  # dead, or none of that name yet
        return None
    return result if len(result) == count else None


def test_anchors_are_shared_and_saved_and_outlive_the_owner_of_the_store(job, wait_for, tmp_path):
    path = tmp_path / "anchors.json"
    one, other, third = (ray.remote(Worker).options(num_cpus=0).remote(str(path)) for _ in range(3))
    anchors = {"a": (1.0, 1.0, 1)}
    ray.get(one.learn.remote("a", 1.0))
    assert wait_for(lambda: all_know(1, one, other), "its anchor at the other") == anchors
    totals, count = ray.get(ray.get_actor(reward_anchors.store_name()).totals.remote())
    assert (sum(each.get("executions", 0.0) for each in totals.values()), count) == (1.0, 1)
    assert json.loads(path.read_text())["anchors"] == {"a": [1.0, 1.0, 1]}

    ray.kill(one)  # it asked first, so it owns the store, which goes with it; the next to ask makes another
    ray.get(other.learn.remote("b", 2.0))
    anchors["b"] = (2.0, 2.0, 1)
    assert wait_for(lambda: store_holds(2), "the new store") == anchors

    assert wait_for(lambda: all_know(2, other, third), "both anchors at the third") == anchors


def test_a_step_that_is_logged_has_all_that_was_counted_before(job):
    ray.get(reward_anchors.anchor_store(None, RewardTimeoutFlags()).totals.remote())  # it is there
    workers = [ray.remote(Worker).options(num_cpus=0).remote(None) for _ in range(3)]
    collect, seen = reward_anchors.Collector(), []
    for step in range(1, 6):
        ray.get([worker.learn.remote(f"{step} {number}", 1.0) for number, worker in enumerate(workers * 4)])
        reward_anchors.flush(workers)
        seen.append(collect(step, {})["reward_timeout/executions"])
    assert seen == [12.0] * 5
    ray.kill(workers[0])
    reward_anchors.flush(workers)


def test_the_store_outlives_a_handle_that_is_let_go(job):
    handle = reward_anchors.anchor_store(None, RewardTimeoutFlags())
    ray.get(handle.exchange.remote("one", Message({"a": (1.0, 1.0, 1)}, {}, {})))
    del handle
    gc.collect()
    time.sleep(2)
    again = reward_anchors.anchor_store(None, RewardTimeoutFlags())
    assert ray.get(again.totals.remote())[1] == 1


def test_what_a_slow_store_takes_long_over_is_counted_once(monkeypatch):
    store = AnchorStore()

    async def exchange(*message):
        await asyncio.sleep(0.3)
        return store.exchange(*message)

    handle = SimpleNamespace(exchange=SimpleNamespace(remote=exchange))
    monkeypatch.setattr(reward_anchors, "anchor_store", lambda path, flags: handle)
    monkeypatch.setattr(reward_anchors.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(reward_anchors, "_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(reward_anchors, "EXCHANGE_SECONDS", 0.01)

    async def main():
        anchors = LocalAnchors()
        client = reward_anchors.StoreClient(anchors, None)
        anchors.record("a", 1.0, 1.0, correct=True)
        anchors.count("executions")
        client.use()
        while not store.totals()[0].get(anchors.process, {}).get("store_unreachable"):
            await asyncio.sleep(0.05)
        await client.close()
        return anchors.process

    process = asyncio.run(main())
    totals, count = store.totals()
    assert totals[process]["executions"] == count == 1


def test_a_stand_in_has_the_form_that_another_process_has_seen(job):
    """The first answers of this process are stopped while those of another process are right."""
    one, other = LocalAnchors(), LocalAnchors()
    clients = [reward_anchors.StoreClient(anchors, None) for anchors in (one, other)]

    async def main():
        made = [
            Scores(
                RewardTimeoutFlags(), anchors, (), ("score",), ("score",), numbers_only=True, exchange=client.exchange
            )
            for anchors, client in zip((one, other), clients, strict=True)
        ]
        other.running = 1
        await clients[1].exchange()
        stopped = asyncio.create_task(made[0].reward_of(ExecutionResult("timeout"), "a", True))
        await asyncio.sleep(0)
        await made[1].reward_of(ExecutionResult("done", {"score": 1.0, "acc": True, "strict": 0.5}), "a", True)
        await clients[1].exchange()
        return await stopped

    assert asyncio.run(main()) == {"score": 0.0, "acc": False, "strict": 0.0}


GRADER = """
import os, ray

@ray.remote(num_cpus=0)
def variable():
    return os.environ.get("RLA_OF_JOB")

def compute():
    ray.init(ignore_reinit_error=True)
    return ray.get_runtime_context().namespace, ray.get(variable.remote())
"""


def test_what_a_grader_starts_on_ray_has_the_namespace_and_the_variables_of_the_job(ray_address, tmp_path):
    (tmp_path / "grader.py").write_text(GRADER)
    ray.init(address=ray_address, namespace="of a job", runtime_env={"env_vars": {"RLA_OF_JOB": "yes"}})

    async def main():
        pool = Graders(f"{tmp_path}/grader.py:compute", 1, defaults=reward_anchors.in_this_job())
        try:
            return await pool.call({}, Limits(wall=100.0))
        finally:
            await pool.close()

    try:
        assert asyncio.run(main()).value == ("of a job", "yes")
    finally:
        ray.shutdown()
