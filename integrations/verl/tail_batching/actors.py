"""The actors that the trainer drives: agent-loop workers, which make responses, and rollout servers, which may die."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from rl_accel.integrations.verl.engines import Engine
from rl_accel.rollout.driver import Event, Job

logger = logging.getLogger("rl_accel")

DELIVERY_SECONDS = 5.0
"""How long the engines are stopped late for workers that do not hear; a response that is aborted by surprise counts as failed."""
PING_SECONDS = 30.0
"""How long to wait for a server's sign of life. One that only is slow passes for alive."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A scored response.

    Attributes:
        keys: where its trajectories lie in TransferQueue; more than one if the agent loop had several outputs.
        metric: what group filtering looks at, if it is on and the reward function gave it.
    """

    keys: tuple[str, ...]
    metric: float | None = None


def varies(prompt_id: str, group: Sequence[Stored]) -> bool:
    """verl's rule (``_dapo_filtered_keys``): a group whose metric is the same throughout teaches nothing.

    Raises:
        RuntimeError: the metric is missing.
    """
    values = [stored.metric for stored in group if stored.metric is not None]
    if len(values) < len(group):
        raise RuntimeError(
            "algorithm.filter_groups.metric must name a metric that the reward function returns; the responses of "
            f"prompt {prompt_id} came without it"
        )
    return len(values) < 2 or float(np.std(values)) != 0.0


class Stoppable(Protocol):
    """What generates; see :class:`RolloutServers`."""

    def abort(self) -> None: ...

    def resume(self) -> None: ...


class Workers:
    """Spreads responses over ``actors`` (handles of ``TailAgentLoopWorker``) and gathers what happens to them.

    One that dies is taken from ``actors``, the list by which verl's manager gives out validation.

    Args:
        actors: the workers.
        servers: what they generate with; it is stopped at the end of a round.
    """

    def __init__(self, actors: list[Any], servers: Stoppable) -> None:
        self._all_actors = actors
        self._servers = servers
        self._actors = dict(enumerate(actors))
        self._running: dict[int, set[int]] = {index: set() for index in self._actors}
        self._home: dict[int, int] = {}
        self._jobs: dict[int, list[Job]] = {}
        self._cancels: dict[int, list[int]] = {}
        self._polls: dict[Any, int] = {}
        self._orders: list[Any] = []

    def begin_round(self) -> None:
        """Let the engines generate, should the last round have stopped them."""
        self._servers.resume()

    def end_round(self) -> None:
        """Stop the engines: whatever still runs was cancelled. They go on with the next round."""
        if not any(self._running.values()):
            return
        self._send(engines_stop=True)
        ray.wait(self._orders, num_returns=len(self._orders), timeout=DELIVERY_SECONDS)
        self._servers.abort()

    def launch(self, job: Job) -> None:
        """Start the responses of ``job`` on the worker that has the fewest.

        Raises:
            RuntimeError: no worker is alive.
        """
        if not self._actors:
            raise RuntimeError("rl_accel.tail_batching: every agent-loop worker has died")
        index = min(self._actors, key=lambda i: len(self._running[i]))
        self._running[index].update(job.response_ids)
        self._home.update(dict.fromkeys(job.response_ids, index))
        self._jobs.setdefault(index, []).append(job)

    def cancel(self, response_ids: Iterable[int]) -> None:
        """Stop these responses. Those that are over already have an event on its way."""
        for response_id in response_ids:
            index = self._home.get(response_id)
            if index is not None:
                self._cancels.setdefault(index, []).append(response_id)

    def wait(self, seconds: float) -> list[Event]:
        """Return events in the order in which each worker reported them; empty if there are none for ``seconds``."""
        self._send()
        waiting = set(self._polls.values())
        for index, actor in self._actors.items():
            if index not in waiting:
                self._polls[actor.next_events.remote()] = index
        ready, _ = ray.wait(list(self._polls), num_returns=1, timeout=seconds)
        if ready and len(self._polls) > 1:
            ready, _ = ray.wait(list(self._polls), num_returns=len(self._polls), timeout=0)
        events = [event for poll in ready for event in self._collect(poll)]
        for event in events:
            if event.kind != "generated":
                self._forget(event.response_id)
        return events

    def _send(self, engines_stop: bool = False) -> None:
        for index in {**self._jobs, **self._cancels}:
            if index in self._actors:
                jobs, cancels = self._jobs.get(index, []), self._cancels.get(index, [])
                order = self._actors[index].act.remote(jobs, cancels, engines_stop)
                self._orders.append(order)
        self._jobs, self._cancels = {}, {}
        if not self._orders:
            return
        done, self._orders = ray.wait(self._orders, num_returns=len(self._orders), timeout=0)
        for order in done:
            with contextlib.suppress(RayActorError):  # its poll says so as well
                ray.get(order)

    def _collect(self, poll: Any) -> list[Event]:
        index = self._polls.pop(poll)
        try:
            events: list[Event] = ray.get(poll)
            return events
        except RayActorError as error:
            lost = sorted(self._running.pop(index))
            self._all_actors.remove(self._actors.pop(index))
            line = f"agent-loop worker {index} died: {error}".splitlines()[0]
            logger.error("rl-accel: %s; %d responses are lost with it", line, len(lost))
            return [Event("failed", response_id, error=line) for response_id in lost]

    def _forget(self, response_id: int) -> None:
        index = self._home.pop(response_id, None)
        if index in self._running:
            self._running[index].discard(response_id)


class ServerLost(RuntimeError):
    """A rollout server died and cannot be started again: training cannot go on with equal weights everywhere."""


class RolloutServers:
    """The rollout servers of a trainer.

    Args:
        manager: verl's ``LLMServerManager``: its replicas and its load balancer are used.
        engine: what they generate with.
    """

    def __init__(self, manager: Any, engine: Engine) -> None:
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
            if isinstance(error, BaseException) and self._engine.is_dead(error):
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
        dead = [replicas[index] for index in find_dead([replica.servers for replica in replicas])]
        if dead:
            ray.get(balancer.remove_servers.remote([replica.server_address for replica in dead]))
        for replica in dead:
            self._start_again(replica)
        known = set(ray.get(balancer.get_all_servers.remote()))
        returned = {r.server_address: r.server_handle for r in replicas if r.server_address not in known}
        if returned:
            ray.get(balancer.add_servers.remote(returned))
        if dead:
            self._manager.server_handles = [replica.server_handle for replica in replicas]
            self._manager.server_addresses = [replica.server_address for replica in replicas]
        return [replica.server_address for replica in dead]

    def _start_again(self, replica: Any) -> None:
        name = f"rollout server {replica.server_address} (replica {replica.replica_rank})"
        if not self._engine.restarts_in_run:
            raise ServerLost(
                f"rl_accel.tail_batching: {name} has died, and its engine cannot be given a new one "
                "while it runs. Resume from the last checkpoint; no prompt is lost by that"
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
    """Return the indices of the groups of actor handles in which an actor, or the engine that it holds, is dead."""

    def ping(index: int, handle: Any) -> tuple[Any, tuple[int, Any]]:
        return handle.__ray_call__.remote(_engine_has_failed), (index, handle)

    pings = dict(ping(index, handle) for index, group in enumerate(groups) for handle in group)
    dead: set[int] = set()
    deadline = time.monotonic() + PING_SECONDS
    while pings and time.monotonic() < deadline:
        ready, late = ray.wait(list(pings), num_returns=len(pings), timeout=PING_SECONDS)
        if late:
            logger.warning(
                "rl-accel: %d rollout servers give no sign of life, nor are they known to be dead", len(late)
            )
        again: dict[Any, tuple[int, Any]] = {}
        for answer in ready:
            index, handle = pings[answer]
            try:
                if ray.get(answer):
                    dead.add(index)
            except ActorUnavailableError:  # Ray does not know yet whether it is dead
                time.sleep(0.05)
                again.update([ping(index, handle)])
            except RayActorError:
                dead.add(index)
        pings = again
    return sorted(dead)


def _engine_has_failed(server: Any) -> bool:
    """Whether the engine of a living server is dead; vLLM's runs in a process of its own and has ``errored``."""
    return bool(getattr(getattr(server, "engine", None), "errored", False))
