"""Gives the rollout of a run another tensor-parallel size: between two steps, new servers take the place of the old ones.

The seams are those of verl's own elastic trainers: the load balancer's lists, ``LLMServerManager``'s launch, and the replicas of
the checkpoint manager, whose weight update fills the new servers. verl has none for the training side of a server, which holds on
to the group of ranks it was made for; :func:`_regroup` is called in each of its processes.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import ray
from omegaconf import OmegaConf
from ray.exceptions import RayActorError

from rl_accel.integrations.verl.tp_replan.restart import end, is_last
from rl_accel.integrations.verl.tp_replan.wiring import TP_KEY
from rl_accel.parallel.tp_decisions import Decision

logger = logging.getLogger("rl_accel")

PATIENCE_SECONDS = 60.0
"""For a server to be gone once it was told to, and for the training workers to take in the new size."""


def change(trainer: Any, step: int, decision: Decision) -> bool:
    """Give the rollout of ``trainer`` the size ``decision.tp`` after ``step``, with the weights of now.

    Whatever fails, the old size comes back. If that fails too, there are no servers: the run is saved and ends, to be launched
    again at the old size.

    Returns:
        Whether the rollout has other servers than before. One line says what happened.
    """
    was = int(OmegaConf.select(trainer.config, TP_KEY))
    if is_last(trainer, step):
        logger.warning("rl-accel: tp_replan: step %d is the last, TP stays at %d", step, was)
        return False
    if busy := _requests(trainer):
        logger.warning("rl-accel: tp_replan: TP stays at %d, servers still hold %d requests", was, busy)
        return False
    began = time.monotonic()
    for tp in (decision.tp, was):
        try:
            _relaunch(trainer, tp)
        except Exception:  # of an engine, of Ray, of a worker
            logger.warning("rl-accel: tp_replan: no servers with TP %d came up", tp, exc_info=True)
            continue
        since = "now" if tp == decision.tp else "again"
        logger.warning("rl-accel: tp_replan: TP is %d %s (%.1f s for new servers)", tp, since, time.monotonic() - began)
        return True
    _stop(trainer)
    end(trainer, step, was, f"no servers came up with TP {decision.tp}, nor with {was} again")
    return True


def _requests(trainer: Any) -> int:
    return int(ray.get(trainer.llm_server_manager.global_load_balancer.get_total_inflight.remote()))


def _relaunch(trainer: Any, tp: int) -> None:
    """Put servers of ``tp`` ranks in the place of whatever servers there are."""
    manager = trainer.llm_server_manager
    _stop(trainer)
    OmegaConf.update(trainer.config, TP_KEY, tp)
    calls = [worker.__ray_call__.remote(_regroup, tp) for worker in trainer.actor_rollout_wg.workers]
    ray.get(calls, timeout=PATIENCE_SECONDS)
    asyncio.run(manager._initialize_llm_servers())
    trainer.checkpoint_manager.replicas = manager.get_replicas()
    trainer.checkpoint_manager.update_weights(trainer.global_steps)
    servers = dict(zip(manager.server_addresses, manager.server_handles, strict=True))
    ray.get(manager.global_load_balancer.add_servers.remote(servers))


def _stop(trainer: Any) -> None:
    """End all servers, half-launched ones too, once nobody is sent to them any more."""
    manager = trainer.llm_server_manager
    balancer = manager.global_load_balancer
    ray.get(balancer.remove_servers.remote(ray.get(balancer.get_all_servers.remote())))
    ray.get(balancer.clear_sticky_cache.remote())
    servers = [server for replica in manager.get_replicas() for server in replica.servers]
    for server in servers:
        ray.kill(server)
    _wait_until_gone(servers)
    manager.rollout_replicas, manager.server_handles, manager.server_addresses = [], [], []
    trainer.checkpoint_manager.replicas = []


def _wait_until_gone(servers: Sequence[Any]) -> None:
    """Their names, and on accelerators their memory, are free then."""
    give_up = time.monotonic() + PATIENCE_SECONDS
    for server in servers:
        while True:
            try:
                ray.get(server.__ray_ready__.remote(), timeout=max(give_up - time.monotonic(), 0.1))
            except RayActorError:
                break
            if time.monotonic() > give_up:
                raise TimeoutError(f"a rollout server that was killed still answers: {server}")
            time.sleep(0.05)


def _regroup(worker: Any, tp: int) -> None:
    """In a process of training workers: have its part of weight updates serve the new groups."""
    for part in (worker, *getattr(worker, "worker_dict", {}).values()):
        regroup = getattr(getattr(part, "rollout", None), "regroup", None)
        if regroup is not None:
            return regroup(tp)
    raise RuntimeError("this worker has no side of a rollout server that can be regrouped")
