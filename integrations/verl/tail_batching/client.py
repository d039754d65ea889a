"""The LLM client of agent loops: what is cancelled stops where it runs, and text that was cut off never passes for whole.

Cancelling an asyncio task that awaits a Ray reference leaves the remote call running. So an agent loop is handed servers that
cancel the call itself and wait until it is over.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError, RayError
from verl.workers.rollout.llm_server import LLMServerClient

from rl_accel.integrations.verl.engines import Engine, engine_of
from rl_accel.integrations.verl.reward_worker_proxy import cancel, outcome
from rl_accel.rollout.driver import TokenRate

logger = logging.getLogger("rl_accel")

_ABORTED = ("aborted", "abort")


@dataclass(eq=False)
class Session:
    """A training response in the making, in the process that makes it."""

    response_id: int
    task: "asyncio.Task[None]" = field(init=False)
    tokens: int = 0
    keys: tuple[str, ...] = ()
    metric: float | None = None
    generating: bool = False
    storing: bool = False
    cancelled: bool = False


SESSION: ContextVar[Session | None] = ContextVar("session", default=None)
"""The response that the running task works on; None in validation."""

TOKEN_RATE = TokenRate()


class GenerationAborted(RuntimeError):
    """The engine cut a response off that nobody had cancelled. It is generated again."""


class ServerDied(RuntimeError):
    """A rollout server or the engine behind it is gone. What it was generating is generated again elsewhere."""


class CancellableServer:
    """A rollout server whose ``generate`` is cancelled together with the task that awaits it; it counts tokens as well.

    Args:
        server: handle of the server actor.
        engine: what it generates with.
        on_death: awaited, with what Ray says, before a call to a dead server raises.
    """

    def __init__(self, server: Any, engine: Engine, on_death: Callable[[str], Awaitable[None]]) -> None:
        self._server = server
        self._engine = engine
        self._on_death = on_death

    @property
    def generate(self) -> "CancellableServer":
        return self

    async def remote(self, **request: Any) -> Any:
        """Return the server's ``TokenOutput``.

        Raises:
            GenerationAborted: the engine aborted it although it is a training response that was not cancelled.
            ServerDied: the server or its engine is gone.
        """
        session = SESSION.get()
        if session is not None and session.cancelled:  # a loop of several turns
            raise asyncio.CancelledError
        call = self._server.generate.remote(**request)
        began = time.perf_counter()
        try:
            output = await self._wait(call, session)
        except RayError as error:
            if not self._engine.is_dead(error):
                raise
            line = str(getattr(error, "cause", None) or error).strip().splitlines()[0]
            await self._on_death(line)
            raise ServerDied(line) from error
        except asyncio.CancelledError:
            if session is not None:
                output = await self._stop(call, request["request_id"])
                seconds = time.perf_counter() - began
                session.tokens += TOKEN_RATE.estimate(seconds) if output is None else len(output.token_ids)
            raise
        if session is None:
            return output
        session.tokens += len(output.token_ids)
        if output.stop_reason in _ABORTED:
            if session.cancelled:  # the engines were stopped because the round is over
                raise asyncio.CancelledError
            raise GenerationAborted(f"the engine aborted the request after {len(output.token_ids)} tokens")
        TOKEN_RATE.add(len(output.token_ids), time.perf_counter() - began)
        return output

    @staticmethod
    async def _wait(call: Any, session: Session | None) -> Any:
        if session is None:
            return await call
        session.generating = True
        try:
            return await call
        finally:
            session.generating = False

    async def _stop(self, call: Any, request_id: str) -> Any:
        """End the call; return what it had generated, or None where that cannot be known."""
        if self._engine.aborts_by_id:
            try:
                if (await self._server.abort_request.remote(request_id))["aborted"]:
                    return await outcome(call)
            except RayError:  # the server is gone, and the call with it
                return None
        return await cancel(call)


class TailLLMServerClient(LLMServerClient):
    """verl's client for a sync trainer. A server that turns out to be dead is taken from the load balancer.

    The trainer starts it again and puts it back after the round, see ``RolloutServers``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._dead: dict[str, str] = {}

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        acquiring = asyncio.ensure_future(super()._acquire_server(request_id, **extra))
        try:
            server_id, server = await asyncio.shield(acquiring)
        except asyncio.CancelledError:
            acquiring.add_done_callback(lambda done: self._give_back(done, request_id))
            raise
        except RuntimeError as error:  # the load balancer has none left
            if not self._dead:
                raise
            dead = "; ".join(f"{name}: {why}" for name, why in self._dead.items())
            raise ServerDied(f"no rollout server is left; dead are {dead}") from error

        async def on_death(line: str) -> None:
            await self._remove(server_id, line)

        return server_id, CancellableServer(server, engine_of(self.config), on_death)

    async def _remove(self, server_id: str, line: str) -> None:
        """Let nobody choose this server any more: having the fewest requests, a dead one would be given every retry."""
        if server_id not in self._dead:
            logger.error("rl-accel: rollout server %s is dead, its requests go to the others: %s", server_id, line)
        self._dead[server_id] = line
        try:
            await self._load_balancer.remove_servers.remote([server_id])
        except RayActorError:
            logger.exception("rl-accel: the load balancer is dead")

    def _give_back(self, acquired: "asyncio.Future[tuple[str, Any]]", request_id: str) -> None:
        # Else the load balancer would count a request on this server for ever.
        if not acquired.cancelled() and acquired.exception() is None:
            self._release_server(acquired.result()[0], request_id=request_id)
