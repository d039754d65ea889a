"""Rollout servers: their requests can be cancelled, and they may die. All that is about death is in this file.

In the agent-loop workers :class:`TailLLMServerClient` hands out servers whose calls end with the task that awaits them; one that
turns out to be dead is given no more requests. In the trainer process :class:`RolloutServers` stops all servers at the end of a
round, and starts dead ones again before the next weights go out.
"""

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from rl_accel.integrations.verl.engines import Engine, engine_of, is_death
from rl_accel.integrations.verl.reward_worker_proxy import cancel, outcome
from rl_accel.patches.seams import extends
from rl_accel.patches.verl import interfaces
from rl_accel.patches.verl.interfaces import LLMServerManager, RolloutReplica, Server, TokenOutput
from rl_accel.rollout.driver import ResponseLost, TokenRate
from rl_accel.switch import forget_when_off

if TYPE_CHECKING:
    LLMServerClient = interfaces.LLMServerClient
else:
    from verl.workers.rollout.llm_server import LLMServerClient

logger = logging.getLogger("rl_accel")

RESUME = "Resume from the last checkpoint; no prompt is lost by that"

PING_SECONDS = 30.0
"""How long to wait for a server's sign of life. One that only is slow passes for alive."""

WATCH_SECONDS = 10.0
"""How often servers are looked at during a call to all, and how long one that died may keep it from ending."""

TOKEN_RATE = TokenRate()
forget_when_off.append(TOKEN_RATE.clear)


@dataclass(eq=False)
class Session:
    """A training response in the making, in the process that makes it.

    Attributes:
        tokens: generated so far.
        keys: where its trajectories lie in TransferQueue once ``storing``.
        metric: what group filtering looks at.
        generating: a server has its request.
        storing: it writes, or has written, to TransferQueue.
        cancelled: nobody wants it any more.
        limit: ends its agent loop.
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


SESSION: ContextVar[Session | None] = ContextVar("session", default=None)
"""The response that the running task works on; None in validation."""


class GenerationAborted(RuntimeError):
    """The engine cut a response off that nobody had cancelled. It is generated again."""


class ServerDied(ResponseLost):
    """A rollout server or the engine behind it is gone. What it was generating is generated again elsewhere."""


class ServerLost(RuntimeError):
    """Rollout servers died and cannot be started again, or not with equal weights everywhere: training cannot go on."""


def _in_one_line(error: BaseException) -> str:
    return str(getattr(error, "cause", None) or error).strip().splitlines()[0]


async def find_dead(replicas: Sequence[RolloutReplica]) -> list[RolloutReplica]:
    """Return those of verl's replicas of which a server actor, or the engine that it holds, is dead."""

    async def is_lost(replica: RolloutReplica) -> bool:
        return any(await asyncio.gather(*map(_is_dead, replica.servers)))

    verdicts = await asyncio.gather(*map(is_lost, replicas))
    return [replica for replica, lost in zip(replicas, verdicts, strict=True) if lost]


async def _is_dead(server: Server) -> bool:
    try:
        async with asyncio.timeout(PING_SECONDS):
            while True:
                try:
                    return bool(await server.__ray_call__.remote(_engine_has_failed))
                except ActorUnavailableError:  # Ray does not know yet whether it is dead
                    await asyncio.sleep(0.05)
    except TimeoutError:
        logger.warning("rl-accel: %s gives no sign of life, nor is it known to be dead", server)
        return False
    except RayActorError:
        return True


def _engine_has_failed(server: Any) -> bool:
    """Whether the engine of a living server is dead; vLLM's runs in a process of its own and has ``errored``."""
    return bool(getattr(getattr(server, "engine", None), "errored", False))


# In the agent-loop workers


class CancellableServer:
    """A rollout server whose ``generate`` is cancelled together with the task that awaits it; it counts tokens as well.

    Cancelling an asyncio task that awaits a Ray reference would leave the remote call running.

    Args:
        server: handle of the server actor.
        engine: what it generates with.
        on_death: awaited, with what Ray says, before a call to a dead server raises.
    """

    def __init__(self, server: Server, engine: Engine, on_death: Callable[[str], Awaitable[None]]) -> None:
        self._server = server
        self._engine = engine
        self._on_death = on_death

    @property
    def generate(self) -> "CancellableServer":
        return self

    async def remote(self, **request: Any) -> TokenOutput:
        """Return the server's ``TokenOutput``.

        Raises:
            GenerationAborted: the engine aborted it although it is a training response that was not cancelled.
            ServerDied: the server or its engine is gone.
        """
        session = SESSION.get()
        if session is None:
            return await self._output(self._server.generate.remote(**request))
        if session.cancelled:  # a loop of several turns
            raise asyncio.CancelledError
        call = self._server.generate.remote(**request)
        began = time.perf_counter()
        session.generating = True
        try:
            output = await self._output(call)
        except asyncio.CancelledError:
            partial = await self._stop(call, request["request_id"])
            seconds = time.perf_counter() - began
            session.tokens += TOKEN_RATE.estimate(seconds) if partial is None else len(partial.token_ids)
            raise
        finally:
            session.generating = False
        session.tokens += len(output.token_ids)
        if output.stop_reason in ("aborted", "abort"):
            if session.cancelled:  # the engines were stopped because the round is over
                raise asyncio.CancelledError
            raise GenerationAborted(f"the engine aborted the request after {len(output.token_ids)} tokens")
        TOKEN_RATE.add(len(output.token_ids), time.perf_counter() - began)
        return output

    async def _output(self, call: Awaitable[TokenOutput]) -> TokenOutput:
        try:
            return await call
        except RayError as error:
            if not is_death(error, self._engine):
                raise
            line = _in_one_line(error)
            await self._on_death(line)
            raise ServerDied(line) from error

    async def _stop(self, call: Awaitable[TokenOutput], request_id: str) -> TokenOutput | None:
        """End the call; return what it had generated, or None where that cannot be known."""
        if self._engine.aborts_by_id:
            try:
                if (await self._server.abort_request.remote(request_id))["aborted"]:
                    return await outcome(call)
            except RayError:  # the server is gone, and the call with it
                return None
        return await cancel(call)


@extends(interfaces.LLMServerClient)
class TailLLMServerClient(LLMServerClient):
    """verl's client for a sync trainer. A server that turns out to be dead is taken from the load balancer.

    The trainer starts it again and puts it back after the round, see :class:`RolloutServers`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._dead: dict[str, str] = {}

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        acquiring = asyncio.ensure_future(super()._acquire_server(request_id, **extra))
        try:
            server_id, server = await asyncio.shield(acquiring)
        except asyncio.CancelledError:  # else the load balancer would count a request on this server for ever
            self._release_server((await acquiring)[0], request_id=request_id)
            raise
        except RuntimeError as error:
            if await self._load_balancer.get_all_servers.remote():
                raise
            dead = "; ".join(f"{name}: {why}" for name, why in self._dead.items())  # others may have found out
            raise ServerLost(f"rl_accel.tail_batching: no rollout server is left ({dead}). {RESUME}") from error
        return server_id, CancellableServer(
            server, engine_of(self.config), on_death=functools.partial(self._remove, server_id)
        )

    async def _remove(self, server_id: str, line: str) -> None:
        """Let nobody choose this server any more: having the fewest requests, a dead one would be given every retry."""
        if server_id not in self._dead:
            logger.error("rl-accel: rollout server %s is dead, its requests go to the others: %s", server_id, line)
        self._dead[server_id] = line
        try:
            await self._load_balancer.remove_servers.remote([server_id])
        except RayActorError:
            logger.exception("rl-accel: the load balancer is dead")


# In the trainer process


class RolloutServers:
    """The rollout servers of a trainer.

    Args:
        manager: verl's ``LLMServerManager``: its replicas and its load balancer are used.
        engine: what they generate with.
    """

    def __init__(self, manager: LLMServerManager, engine: Engine) -> None:
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

        with self._watched(_end_servers):
            answers = asyncio.run(tell())
        for error in answers:
            if isinstance(error, BaseException):
                if not is_death(error, self._engine):
                    raise error
                logger.warning("rl-accel: a rollout server did not take part in %s: %s", name, _in_one_line(error))

    def reach_all(self, call: Callable[[], None]) -> None:
        """Make a ``call`` that reaches every server, with dead ones started again first, and again if one dies meanwhile.

        Raises:
            ServerLost: see :meth:`revive`.
            RayError: the call failed although every server lives.
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
        """Make a ``call`` that sends weights to every server, with dead ones started again first.

        Raises:
            ServerLost: as in :meth:`revive`; or a server died meanwhile. verl's training workers wait for it and for each
                other without end, so they are ended.
            RayError: the call failed although every server lives.
        """
        self.revive()
        try:
            with self._watched(self._end_training_workers):
                call()
        except RayError as error:
            dead = asyncio.run(find_dead(self._manager.get_replicas()))
            if not dead:
                raise
            names = ", ".join(replica.server_address for replica in dead)
            raise ServerLost(
                f"rl_accel.tail_batching: rollout server {names} died while it was given new weights. {RESUME}"
            ) from error

    @contextlib.contextmanager
    def _watched(self, end: Callable[[list[RolloutReplica]], None]) -> Iterator[None]:
        """Call ``end`` with the dead replicas if the block does not end: vLLM never answers calls that its engine died under."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(WATCH_SECONDS):
                try:
                    dead = asyncio.run(find_dead(self._manager.get_replicas()))
                except Exception:  # the only one who would end the block: it must not stop looking
                    logger.exception("rl-accel: whether rollout servers live could not be found out; trying again")
                    continue
                if dead and not over.wait(WATCH_SECONDS):  # else the block has found out itself
                    logger.error("rl-accel: a rollout server died and left calls without an answer; they are ended")
                    end(dead)
                    return

        threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _end_training_workers(self, _dead: list[RolloutReplica]) -> None:
        for worker in (worker for replica in self._manager.get_replicas() for worker in replica.workers):
            ray.kill(worker)

    def revive(self) -> list[str]:
        """Start dead servers again and have the load balancer know exactly those that live; return the revived ones.

        Call it while nothing is generated and before the next weight update: a new server has the weights of the model's
        files until then.

        Raises:
            ServerLost: names the server; its engine cannot be started again, or the attempt failed.
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
        for server in replica.servers:  # of a replica of several, those that live
            ray.kill(server)
        replica.servers = []
        try:
            asyncio.run(replica.launch_servers())
            ray.get([worker.__ray_call__.remote(_forget_server) for worker in replica.workers])
        except Exception as error:
            raise ServerLost(
                f"rl_accel.tail_batching: {name} has died and could not be started again: {error}. {RESUME}"
            ) from error
        logger.warning("rl-accel: %s had died and was started again; it joins with the next weights", name)


def _end_servers(dead: list[RolloutReplica]) -> None:
    for server in (server for replica in dead for server in replica.servers):
        ray.kill(server)


def _forget_server(worker: Any) -> None:
    """Have a training worker, one of verl's ``WorkerDict``, look up again by name the server that it sends weights to."""
    for part in worker.worker_dict.values():
        if getattr(getattr(part, "rollout", None), "server_handle", None) is not None:
            part.rollout.server_handle = None
