"""Rollout servers as the trainer process sees them: it stops them all, restarts dead ones, and sends them new weights."""

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from rl_accel.errors import first_line
from rl_accel.integrations.verl.engines import EngineSupport, is_death
from rl_accel.integrations.verl.tail_batching.messages import RESUME, ServerLost
from rl_accel.integrations.verl.tail_batching.remote_calls import engine_has_failed, forget_server
from rl_accel.patches.verl.interfaces import LLMServerManager, RolloutReplica, RolloutServer

logger = logging.getLogger("rl_accel")

PING_SECONDS = 30.0
"""Maximum seconds to wait for a rollout server's answer to a ping. A server that is late counts as alive. Chosen by hand."""
WATCH_SECONDS = 10.0
"""Seconds between checks for dead servers during a call to all rollout servers. If a server is found dead, the call is ended by
force, unless it ends by itself within another WATCH_SECONDS. Chosen by hand."""


async def find_dead(replicas: Sequence[RolloutReplica]) -> list[RolloutReplica]:
    """Returns those of the rollout ``replicas`` that have a dead server actor or a dead engine."""

    async def is_lost(replica: RolloutReplica) -> bool:
        return any(await asyncio.gather(*map(_is_dead, replica.servers)))

    return [*itertools.compress(replicas, await asyncio.gather(*map(is_lost, replicas)))]


async def _is_dead(server: RolloutServer) -> bool:
    try:
        async with asyncio.timeout(PING_SECONDS):
            while True:
                try:
                    return bool(await server.__ray_call__.remote(engine_has_failed))
                except ActorUnavailableError:  # Ray does not know yet whether the server is dead
                    await asyncio.sleep(0.05)
    except TimeoutError:
        logger.warning("rl-accel: %s did not answer within %g s and counts as alive", server, PING_SECONDS)
        return False
    except RayActorError:
        return True


class RolloutServers:
    """The rollout servers of a trainer, controlled from the trainer process: abort, resume, weight update and restart.

    Args:
        manager: verl's ``LLMServerManager``, which holds the replicas and the load balancer.
        engine: capabilities of the servers' inference engine.
    """

    def __init__(self, manager: LLMServerManager, engine: EngineSupport) -> None:
        self._manager = manager
        self._engine = engine
        self._aborted = False

    def abort(self) -> None:
        """Aborts all running requests, which then return their partial outputs. New requests wait until :meth:`resume`."""
        self._aborted = True
        if (pause := self._engine.pause) is None:
            self._tell_all("abort_all_requests", lambda replica: replica.abort_all_requests())
        else:
            self._tell_all("abort_all_requests", lambda replica: replica.servers[0].__ray_call__.remote(pause))

    def resume(self) -> None:
        """Resumes generation on all servers after :meth:`abort`. Does nothing if generation was not aborted."""
        if self._aborted:
            self._tell_all("resume_generation", lambda replica: replica.resume_generation())
            self._aborted = False

    def end_calls_of_dead(self) -> None:
        """Kills servers with a dead engine. Otherwise, calls that wait for the engine might never end."""
        if dead := self._find_dead():
            logger.error("rl-accel: rollout server %s is dead; calls that still wait for it are ended", _names(dead))
            _end_servers(dead)

    def _tell_all(self, name: str, call: Callable[[RolloutReplica], Awaitable[Any]]) -> None:
        """Runs ``call`` for every replica. Errors of dead replicas are only logged; ``name`` is the name of the call in the log."""

        async def tell() -> list[Any]:
            calls = [call(replica) for replica in self._manager.get_replicas()]
            return await asyncio.gather(*calls, return_exceptions=True)

        with self._watched(_end_servers):
            answers = asyncio.run(tell())
        for error in answers:
            if isinstance(error, BaseException):
                if not is_death(error, self._engine):
                    raise error
                logger.warning("rl-accel: a rollout server did not take part in %s: %s", name, first_line(error))

    def reach_all(self, call: Callable[[], None]) -> None:
        """Restarts dead servers, then runs ``call``, which calls all servers. Repeats both steps if a server dies meanwhile.

        Raises ServerLost as :meth:`revive`, and RayError if ``call`` failed although every server is alive.
        """
        self.revive()
        while True:
            try:
                with self._watched(_end_servers):
                    return call()
            except RayError:
                if not self.revive():
                    raise

    def update_weights(self, call: Callable[[], None]) -> None:
        """Restarts dead servers, then runs ``call``, which sends weights to every server.

        Raises:
            ServerLost: a dead server cannot be restarted (see :meth:`revive`), or a server died during ``call``. Training workers
                that wait for the dead server are killed, because nothing else ends their calls.
            RayError: ``call`` failed although every server is alive.
        """
        self.revive()
        try:
            with self._watched(self._end_training_workers):
                call()
        except RayError as error:
            dead = asyncio.run(find_dead(self._manager.get_replicas()))
            if not dead:
                raise
            raise ServerLost(
                f"rl_accel.tail_batching: rollout server {_names(dead)} died while it was given new weights. {RESUME}"
            ) from error

    @contextlib.contextmanager
    def _watched(self, end: Callable[[list[RolloutReplica]], None]) -> Iterator[None]:
        """Context manager for code that calls all servers. If a server dies and the code hangs, ``end(dead_replicas)`` is called.

        This function must end the pending calls.
        """
        over = threading.Event()

        def watch() -> None:
            while not over.wait(WATCH_SECONDS):
                # vLLM never answers a call after the death of its engine.
                # The second wait is a grace period in which the block may end without help.
                if (dead := self._find_dead()) and not over.wait(WATCH_SECONDS):
                    logger.error("rl-accel: a rollout server died and left calls without an answer; they are ended")
                    end(dead)
                    return

        threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _find_dead(self) -> list[RolloutReplica]:
        """Returns the dead replicas; [] after an error, which is logged."""
        try:
            return asyncio.run(find_dead(self._manager.get_replicas()))
        except Exception:
            logger.exception("rl-accel: could not check whether rollout servers are alive; trying again")
            return []

    def _end_training_workers(self, _dead: list[RolloutReplica]) -> None:
        for worker in (worker for replica in self._manager.get_replicas() for worker in replica.workers):
            ray.kill(worker)

    def revive(self) -> list[str]:
        """Restarts dead servers, and returns their addresses. Afterwards, the load balancer lists exactly the living servers.

        Call this method while nothing is generated and before the next weight update. Until that update, a new server has the
        weights of the model's files.

        Raises:
            ServerLost: a server's engine cannot be restarted, or the restart failed.
        """
        replicas = self._manager.get_replicas()
        balancer = self._manager.global_load_balancer
        dead = asyncio.run(find_dead(replicas))
        if dead:
            ray.get(balancer.remove_servers.remote([replica.server_address for replica in dead]))
            for replica in dead:
                self._start_again(replica)
            self._manager.server_handles = [replica.server_handle for replica in replicas]
            self._manager.server_addresses = [replica.server_address for replica in replicas]
        known = set(ray.get(balancer.get_all_servers.remote()))
        returned = {r.server_address: r.server_handle for r in replicas if r.server_address not in known}
        if returned:
            ray.get(balancer.add_servers.remote(returned))
        return [replica.server_address for replica in dead]

    def _start_again(self, replica: RolloutReplica) -> None:
        name = f"rollout server {replica.server_address} (replica {replica.replica_rank})"
        if not self._engine.restarts_in_run:
            raise ServerLost(
                f"rl_accel.tail_batching: {name} has died, and its engine cannot be given a new one while it runs. {RESUME}"
            )
        for server in replica.servers:  # other servers of the replica may be alive
            ray.kill(server)
        replica.servers = []
        try:
            asyncio.run(replica.launch_servers())
            ray.get([worker.__ray_call__.remote(forget_server) for worker in replica.workers])
        except Exception as error:
            raise ServerLost(
                f"rl_accel.tail_batching: {name} has died and could not be started again: {first_line(error)}. {RESUME}"
            ) from error
        logger.warning("rl-accel: %s had died and was started again; it joins with the next weights", name)


def _names(dead: list[RolloutReplica]) -> str:
    return ", ".join(replica.server_address for replica in dead)


def _end_servers(dead: list[RolloutReplica]) -> None:
    for server in (server for replica in dead for server in replica.servers):
        ray.kill(server)
