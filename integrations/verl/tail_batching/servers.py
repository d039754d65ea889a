"""Rollout servers with cancellable requests, and with restarts of dead servers.

In the agent-loop workers, :class:`TailLLMServerClient` returns servers whose calls are cancelled together with the awaiting task.
Dead servers get no more requests. In the trainer process, :class:`RolloutServers` stops all servers at the end of a
tail-batching round (a rollout), and restarts dead servers before the next weight update.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import psutil
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from rl_accel.errors import first_line
from rl_accel.integrations.verl.engines import EngineSupport, engine_of, is_death
from rl_accel.integrations.verl.reward_worker_proxy import cancel, outcome
from rl_accel.patches.verl import interfaces
from rl_accel.patches.verl.interfaces import LLMServerManager, RolloutReplica, RolloutServer, TokenOutput
from rl_accel.rollout.round_driver import ResponseLost, TokenRate

if TYPE_CHECKING:
    LLMServerClient = interfaces.LLMServerClient
else:
    from verl.workers.rollout.llm_server import LLMServerClient

logger = logging.getLogger("rl_accel")

RESUME = "Resume from the last checkpoint; no prompt is lost by that"
PING_SECONDS = 30.0
"""Maximum seconds to wait for a rollout server's answer to a ping. A server that is late counts as alive. Chosen by hand."""
WATCH_SECONDS = 10.0
"""Seconds between checks for dead servers during a call to all rollout servers. If a server is found dead, the call is ended by
force, unless it ends by itself within another WATCH_SECONDS. Chosen by hand."""


@dataclass(eq=False)
class Session:
    """State of an unfinished training response, in the agent-loop worker that runs the response.

    Attributes:
        response_id: id of the response in the trainer process.
        task: asyncio task that runs the response.
        limit: asyncio timeout of the agent loop.
        tokens: number of tokens generated so far.
        keys: TransferQueue keys of the trajectories, which are written once ``storing`` is True.
        metric: number by which group filtering compares the responses of a prompt; None if unknown.
        generating: True while a rollout server has a request of the response.
        storing: True once the write to TransferQueue has started.
        cancelled: True once the trainer process has cancelled the response.
        interrupted: True once :meth:`interrupt` was called.
    """

    response_id: int
    task: "asyncio.Task[None]" = field(init=False)
    limit: asyncio.Timeout = field(init=False)
    tokens: int = 0
    keys: tuple[str, ...] = ()
    metric: float | None = None
    generating: bool = False
    storing: bool = False
    cancelled: bool = False
    interrupted: bool = False

    def is_busy(self) -> bool:
        """Returns True while a rollout server has a request of the response, or while its trajectories are written."""
        return self.generating or self.storing

    def is_over(self) -> bool:
        """Returns True if the agent loop must end: its response is cancelled, or its time limit has passed."""
        return self.cancelled or self.limit.expired()

    def is_interrupted(self) -> bool:
        return self.interrupted

    def interrupt(self) -> NoReturn:
        """Raises asyncio.CancelledError in the agent loop that calls this method, and cancels the task of the response."""
        self.interrupted = True
        self.task.cancel()
        raise asyncio.CancelledError


SESSION: ContextVar[Session | None] = ContextVar("session", default=None)
"""Context variable with the training response that the running asyncio task works on; None in validation."""


class GenerationAborted(RuntimeError):
    """The engine has aborted a response that the trainer had not cancelled. This uses up one of the response's ``max_retries``."""


class ServerDied(ResponseLost):
    """A rollout server or its engine has died. Its responses are generated again on another server."""


class ServerLost(RuntimeError):
    """Training cannot go on: no server is left, a dead server cannot be restarted, or a server died during a weight update."""


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
                    return bool(await server.__ray_call__.remote(_engine_has_failed))
                except ActorUnavailableError:  # Ray does not know yet whether the server is dead
                    await asyncio.sleep(0.05)
    except TimeoutError:
        logger.warning("rl-accel: %s did not answer within %g s and counts as alive", server, PING_SECONDS)
        return False
    except RayActorError:
        return True


def _engine_has_failed(server: Any) -> bool:
    """Returns True if the engine of a living server is dead. Called in the server's process.

    vLLM's engine then has the flag ``errored``. With SGLang, a child process of the server has ended.
    """
    # SGLang then sends SIGQUIT to the server, but the server of a run in the background of a script ignores this signal.
    pids = getattr(getattr(server, "scheduler_info", None), "all_child_pids", ())
    return bool(getattr(getattr(server, "engine", None), "errored", False)) or any(map(_has_ended, pids))


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# In the agent-loop workers


class CancellableServer:
    """Proxy of a rollout server. Cancelling a task that awaits ``generate`` also cancels the remote call.

    The proxy also counts the generated tokens in the :class:`Session` of the response.

    Args:
        server: handle of the server, a Ray actor.
        engine: capabilities of the server's engine.
        rate: estimates the tokens of a response that was cancelled without an answer of the engine.
        on_death: async function that takes Ray's error message. Awaited before a call to a dead server raises.
    """

    def __init__(
        self, server: RolloutServer, engine: EngineSupport, rate: TokenRate, on_death: Callable[[str], Awaitable[None]]
    ) -> None:
        self._server, self._engine, self._rate, self._on_death = server, engine, rate, on_death

    @property
    def generate(self) -> "CancellableServer":
        return self

    async def remote(self, **request: Any) -> TokenOutput:
        """Sends a request to the server and returns its answer.

        Raises:
            GenerationAborted: the engine aborted a training response that was not cancelled.
            ServerDied: the server or its engine has died.
        """
        session = SESSION.get()
        if session is None:
            return await self._output(self._server.generate.remote(**request))
        if session.is_over():  # a multi-turn agent loop wants to begin its next turn
            session.interrupt()
        call = self._server.generate.remote(**request)
        began = time.perf_counter()
        session.generating = True
        try:
            output = await self._output(call)
        except asyncio.CancelledError:
            partial = await self._stop(call, request["request_id"])
            seconds = time.perf_counter() - began
            session.tokens += self._rate.estimate(seconds) if partial is None else len(partial.token_ids)
            raise
        finally:
            session.generating = False
        session.tokens += len(output.token_ids)
        if output.stop_reason in ("aborted", "abort"):
            if session.cancelled:  # the engines were stopped because the round is over
                session.interrupt()
            raise GenerationAborted(f"the engine aborted the request after {len(output.token_ids)} tokens")
        self._rate.add(len(output.token_ids), time.perf_counter() - began)
        return output

    async def _output(self, call: Awaitable[TokenOutput]) -> TokenOutput:
        try:
            return await call
        except RayError as error:
            if not is_death(error, self._engine):
                raise
            line = first_line(error)
            await self._on_death(line)
            raise ServerDied(line) from error

    async def _stop(self, call: Awaitable[TokenOutput], request_id: str) -> TokenOutput | None:
        """Ends the remote ``call`` of a request. Returns the partial output of the call, or None if the output is unknown."""
        if self._engine.aborts_by_id:
            try:
                if (await self._server.abort_request.remote(request_id))["aborted"]:
                    return await outcome(call)
            except RayError:  # the server is gone, and the call with it
                return None
        elif self._engine.abort is not None:
            try:
                if await self._server.__ray_call__.remote(self._engine.abort, request_id):
                    return await outcome(call)
            except RayError:
                return None
        return await cancel(call)


class TailLLMServerClient(LLMServerClient):
    """verl's client of the rollout servers, with cancellable requests. Removes dead servers from verl's load balancer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rate = TokenRate()
        self._dead: dict[str, str] = {}

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        acquiring = asyncio.ensure_future(super()._acquire_server(request_id, **extra))
        try:
            server_id, server = await asyncio.shield(acquiring)
        except asyncio.CancelledError:  # otherwise the load balancer would count this request on the server forever
            self._release_server((await acquiring)[0], request_id=request_id)
            raise
        except RuntimeError as error:
            if await self._load_balancer.get_all_servers.remote():
                raise
            dead = "; ".join(f"{name}: {why}" for name, why in self._dead.items())  # seen by this worker
            raise ServerLost(f"rl_accel.tail_batching: no rollout server is left ({dead}). {RESUME}") from error
        on_death = functools.partial(self._remove, server_id)
        return server_id, CancellableServer(server, engine_of(self.config), self._rate, on_death)

    async def _remove(self, server_id: str, line: str) -> None:
        """Removes a dead server from the load balancer. Otherwise, retries would go to it, because it has the fewest requests."""
        if server_id not in self._dead:
            logger.error("rl-accel: rollout server %s is dead, its requests go to the others: %s", server_id, line)
        self._dead[server_id] = line
        try:
            await self._load_balancer.remove_servers.remote([server_id])
        except RayActorError:
            logger.exception("rl-accel: the load balancer is dead")


# In the trainer process


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
            ray.get([worker.__ray_call__.remote(_forget_server) for worker in replica.workers])
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


def _forget_server(worker: Any) -> None:
    """Clears a training worker's handle of a dead server. The worker then looks up the restarted server by name."""
    for part in worker.worker_dict.values():
        if getattr(getattr(part, "rollout", None), "server_handle", None) is not None:
            part.rollout.server_handle = None
