"""Rollout servers that have died are started again between rounds; verl's own weight update would fail on them, or hang."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

logger = logging.getLogger("rl_accel")

STARTS_AGAIN = ("hf_cpu",)
"""Engines whose training side looks its server up for each weight update. Others (vLLM, SGLang) hold on to the first one."""

PING_SECONDS = 30.0
"""How long to wait for a server's sign of life. One that only is slow passes for alive."""


class ServerLost(RuntimeError):
    """A rollout server died and cannot be started again: training cannot go on with equal weights everywhere."""


class Servers:
    """The rollout servers of a trainer.

    Args:
        manager: verl's ``LLMServerManager``: its replicas and its load balancer are used.
        engine: ``rollout.name``.
    """

    def __init__(self, manager: Any, engine: str) -> None:
        self._manager = manager
        self._engine = engine
        self._aborted = False

    def abort(self) -> None:
        """Have every server end its requests, which return what they have. Later ones wait for :meth:`resume`."""
        self._aborted = True
        self._tell_all("abort_all_requests")

    def resume(self) -> None:
        """Go on after :meth:`abort`; nothing happens without one."""
        if self._aborted:
            self._tell_all("resume_generation")
            self._aborted = False

    def _tell_all(self, name: str) -> None:
        """Call a method of every replica. Dead ones are passed over: who needs them finds out."""

        async def tell() -> list[Any]:
            calls = [getattr(replica, name)() for replica in self._manager.get_replicas()]
            return await asyncio.gather(*calls, return_exceptions=True)

        for error in asyncio.run(tell()):
            if isinstance(error, RayActorError):
                logger.warning("rl-accel: a rollout server did not take part in %s: %s", name, error)
            elif isinstance(error, BaseException):
                raise error

    def reach_all(self, call: Callable[[], None]) -> None:
        """Make a ``call`` that reaches every server, with dead ones started again first, and again if one dies meanwhile.

        Raises:
            ServerLost: see :meth:`revive`.
            RayError: the call failed although every server lives.
        """
        self.revive()
        while True:
            try:
                return call()
            except RayError:
                if not self.revive():
                    raise

    def revive(self) -> list[str]:
        """Start dead servers again and have the load balancer know exactly those that live; return the revived ones.

        Call it while nothing is generated and before the next weight update: a new server has the weights of the model's
        files until then.

        Raises:
            ServerLost: names the server; its engine cannot be started again, or the attempt failed.
        """
        replicas = self._manager.get_replicas()
        balancer = self._manager.global_load_balancer
        lost = find_dead([replica.servers for replica in replicas])
        dead = [replicas[index] for index in lost]
        if dead:
            ray.get(balancer.remove_servers.remote([replica.server_address for replica in dead]))
        for replica in dead:
            self._start_again(replica)
        known = set(ray.get(balancer.get_all_servers.remote()))
        back = {r.server_address: r.server_handle for r in replicas if r.server_address not in known}
        if back:
            ray.get(balancer.add_servers.remote(back))
        if dead:
            self._manager.server_handles = [replica.server_handle for replica in replicas]
            self._manager.server_addresses = [replica.server_address for replica in replicas]
        return [replica.server_address for replica in dead]

    def _start_again(self, replica: Any) -> None:
        name = f"rollout server {replica.server_address} (replica {replica.replica_rank})"
        if self._engine not in STARTS_AGAIN:
            raise ServerLost(
                f"rl_accel.tail_batching: {name} has died, and rollout.name={self._engine} cannot be given a new one while "
                "it runs. Resume from the last checkpoint; no prompt is lost by that"
            )
        for server in replica.servers:  # of a replica of several, those that live
            ray.kill(server)
        replica.servers = []
        try:
            asyncio.run(replica.launch_servers())
        except Exception as error:
            raise ServerLost(
                f"rl_accel.tail_batching: {name} has died and could not be started again: {error}"
            ) from error
        logger.warning("rl-accel: %s had died and was started again; it joins with the next weights", name)


def find_dead(groups: Sequence[Sequence[Any]]) -> list[int]:
    """Return the indices of the groups of actor handles in which an actor is dead."""
    pings = {handle.__ray_ready__.remote(): (index, handle) for index, group in enumerate(groups) for handle in group}
    dead: set[int] = set()
    deadline = time.monotonic() + PING_SECONDS
    while pings and time.monotonic() < deadline:
        ready, late = ray.wait(list(pings), num_returns=len(pings), timeout=PING_SECONDS)
        if late:
            logger.warning(
                "rl-accel: %d rollout servers give no sign of life, nor are they known to be dead", len(late)
            )
        again = {}
        for ping in ready:
            index, handle = pings[ping]
            try:
                ray.get(ping)
            except ActorUnavailableError:  # Ray does not know yet whether it is dead
                time.sleep(0.05)
                again[handle.__ray_ready__.remote()] = index, handle
            except RayActorError:
                dead.add(index)
        pings = again
    return sorted(dead)
