"""New servers in place of old ones, with real actors behind verl's own load balancer, and whatever can fail on the way."""

import asyncio
import os
import signal
from types import SimpleNamespace

import pytest
import ray
from omegaconf import OmegaConf
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from rl_accel.integrations.ray import restart_note
from rl_accel.integrations.verl.tp_replan import live
from rl_accel.integrations.verl.tp_replan.wiring import TP_KEY
from rl_accel.parallel.tp_decisions import Decision

pytestmark = pytest.mark.slow
RANKS = 2
DECISION = Decision(2, "raise", "too many preemptions", "fewer")


@pytest.fixture(scope="module")
def balancer():
    """verl's own, for all tests: a process that imports verl takes seconds."""
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield ray.remote(GlobalRequestLoadBalancer).options(num_cpus=0).remote(servers={})
    ray.shutdown()


@ray.remote(num_cpus=0)
class Server:
    def __init__(self):
        self.weights = None

    def pid(self):
        return os.getpid()

    def load(self, step):
        self.weights = step

    def loaded(self):
        return self.weights


@ray.remote(num_cpus=0)
class Worker:
    """A fused training worker of verl: the part with the rollout is one of several."""

    def __init__(self, regroups):
        self.groups = []
        rollout = SimpleNamespace(regroup=self.groups.append) if regroups else SimpleNamespace()
        self.worker_dict = {"critic": SimpleNamespace(), "actor": SimpleNamespace(rollout=rollout)}

    def seen(self):
        return self.groups


class Manager:
    """Stands for verl's LLMServerManager: named servers of as many ranks as the configuration says."""

    def __init__(self, config, balancer):
        self.config, self.deadly, self.global_load_balancer = config, set(), balancer

    async def _initialize_llm_servers(self):
        tp = OmegaConf.select(self.config, TP_KEY)
        self.rollout_replicas = []
        for rank in range(RANKS // tp):
            server = Server.options(name=f"server_{rank}").remote()
            self.rollout_replicas.append(SimpleNamespace(servers=[server], name=f"server_{rank}"))
            pid = await server.pid.remote()
            if tp in self.deadly and rank == RANKS // tp - 1:  # of two, the first lives
                os.kill(pid, signal.SIGKILL)
                await server.loaded.remote()
        self.server_handles = [replica.servers[0] for replica in self.rollout_replicas]
        self.server_addresses = [replica.name for replica in self.rollout_replicas]

    def get_replicas(self):
        return self.rollout_replicas


class Checkpoints:
    """Stands for verl's CheckpointEngineManager: weights go to all replicas."""

    def __init__(self):
        self.replicas = []

    def sleep_replicas(self):
        pass

    def update_weights(self, step):
        ray.get([replica.servers[0].load.remote(step) for replica in self.replicas])


@pytest.fixture
def begin(tmp_path, balancer):
    """``begin(deadly sizes)``: a trainer after step 7 with two servers of one rank."""
    trainers = []

    def make(deadly=(), regroups=True):
        config = OmegaConf.create(
            {
                "actor_rollout_ref": {"rollout": {"tensor_model_parallel_size": 1}},
                "trainer": {"default_local_dir": str(tmp_path), "total_epochs": 1, "save_freq": -1},
            }
        )
        manager = Manager(config, balancer)
        asyncio.run(manager._initialize_llm_servers())
        manager.deadly = set(deadly)
        servers = dict(zip(manager.server_addresses, manager.server_handles, strict=True))
        ray.get(balancer.add_servers.remote(servers))
        saved = []
        trainer = SimpleNamespace(
            config=config,
            llm_server_manager=manager,
            actor_rollout_wg=SimpleNamespace(workers=[Worker.remote(regroups)]),
            checkpoint_manager=Checkpoints(),
            global_steps=7,
            total_training_steps=10,
            steps_per_epoch=100,
            saved=saved,
            _save_checkpoint=lambda: saved.append(7),
        )
        trainers.append(trainer)
        return trainer

    yield make
    for trainer in trainers:
        live._stop(trainer)


@pytest.fixture
def notes(monkeypatch):
    left = []
    monkeypatch.setattr(restart_note, "publish", left.append)
    return left


def known(trainer):
    return set(ray.get(trainer.llm_server_manager.global_load_balancer.get_all_servers.remote()))


def weights(trainer):
    return ray.get([server.loaded.remote() for server in trainer.llm_server_manager.server_handles])


def groups(trainer):
    return ray.get([worker.seen.remote() for worker in trainer.actor_rollout_wg.workers])


def test_new_servers_take_the_place_of_all_old_ones(begin, notes, caplog):
    trainer = begin()
    old = ray.get([server.pid.remote() for server in trainer.llm_server_manager.server_handles])
    assert live.change(trainer, 7, DECISION)
    assert OmegaConf.select(trainer.config, TP_KEY) == 2
    assert known(trainer) == {"server_0"}
    assert weights(trainer) == [7]
    assert groups(trainer) == [[2]]
    new = ray.get([server.pid.remote() for server in trainer.llm_server_manager.server_handles])
    assert not set(new) & set(old)
    assert not [pid for pid in old if os.path.exists(f"/proc/{pid}")], "their memory is free"
    assert caplog.text.count("TP is 2 now") == 1
    assert (trainer.total_training_steps, notes) == (10, [])


def test_a_server_that_dies_on_the_way_brings_the_old_size_back(begin, notes, caplog):
    trainer = begin(deadly={2})
    assert live.change(trainer, 7, DECISION)
    assert OmegaConf.select(trainer.config, TP_KEY) == 1
    assert known(trainer) == {f"server_{rank}" for rank in range(RANKS)}
    assert weights(trainer) == [7] * RANKS
    assert groups(trainer) == [[2, 1]]
    assert "no servers with TP 2 came up" in caplog.text
    assert "TP is 1 again" in caplog.text
    assert (trainer.total_training_steps, notes) == (10, [])


def test_without_any_servers_the_run_is_saved_and_ends_to_be_launched_again(begin, notes, caplog):
    trainer = begin(deadly={1, 2})
    live.change(trainer, 7, DECISION)
    assert trainer.saved == [7]
    assert trainer.total_training_steps == 7
    (note,) = notes
    assert (note["step"], note["tp"]) == (7, 1)
    assert f"{TP_KEY}=1" in note["overrides"]
    assert known(trainer) == set()
    assert "the run cannot go on after step 7: no servers came up with TP 2, nor with 1 again" in caplog.text


def test_not_even_a_checkpoint_keeps_the_run_from_ending(begin, notes, caplog):
    trainer = begin(deadly={1, 2})

    def full():
        raise OSError("no space left on device")

    trainer._save_checkpoint = full
    live.change(trainer, 7, DECISION)
    assert trainer.total_training_steps == 7
    assert len(notes) == 1
    assert "steps since the last checkpoint are lost" in caplog.text


def test_workers_that_cannot_serve_another_size_end_the_run_in_order(begin, notes):
    trainer = begin(regroups=False)
    live.change(trainer, 7, DECISION)
    assert trainer.saved == [7]
    assert len(notes) == 1


def test_servers_with_requests_are_left_alone(begin, caplog):
    trainer = begin()
    before = trainer.llm_server_manager.server_handles
    ray.get(trainer.llm_server_manager.global_load_balancer.acquire_server.remote(request_id="one"))
    assert not live.change(trainer, 7, DECISION)
    assert trainer.llm_server_manager.server_handles is before
    assert OmegaConf.select(trainer.config, TP_KEY) == 1
    assert "servers still hold 1 requests" in caplog.text


def test_after_the_last_step_nothing_is_changed(begin):
    trainer = begin()
    trainer.total_training_steps = 7
    assert not live.change(trainer, 7, DECISION)
    assert OmegaConf.select(trainer.config, TP_KEY) == 1
