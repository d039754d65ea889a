"""Rollout servers as an agent-loop worker sees them: a request is cancelled together with the task that awaits it.

Dead servers get no more requests.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError, RayError

from rl_accel.errors import first_line
from rl_accel.integrations.ray.calls import cancel_call, outcome
from rl_accel.integrations.verl.engines import EngineSupport, engine_of, is_death
from rl_accel.integrations.verl.tail_batching.messages import RESUME, ServerLost
from rl_accel.patches.verl import interfaces
from rl_accel.patches.verl.interfaces import RolloutServer, TokenOutput
from rl_accel.rollout.cleanup import Interruptible
from rl_accel.rollout.round_driver import ResponseLost, TokenRate

if TYPE_CHECKING:
    LLMServerClient = interfaces.LLMServerClient
else:
    from verl.workers.rollout.llm_server import LLMServerClient

logger = logging.getLogger("rl_accel")


@dataclass(eq=False)
class Session(Interruptible):
    """State of an unfinished training response, in the agent-loop worker that runs the response.

    Attributes:
        response_id: id of the response in the trainer process.
        tokens: number of tokens generated so far.
        keys: TransferQueue keys of the trajectories, which are written once ``storing`` is True.
        metric: number by which group filtering compares the responses of a prompt; None if unknown.
        generating: True while a rollout server has a request of the response.
        storing: True once the write to TransferQueue has started.
        cancelled: True once the trainer process has cancelled the response.
    """

    response_id: int
    tokens: int = 0
    keys: tuple[str, ...] = ()
    metric: float | None = None
    generating: bool = False
    storing: bool = False
    cancelled: bool = False

    def is_busy(self) -> bool:
        """Returns True while a rollout server has a request of the response, or while its trajectories are written."""
        return self.generating or self.storing

    def must_end(self) -> bool:
        """Returns True if the agent loop must end: its response is cancelled, or its time limit has passed."""
        return self.cancelled or self.is_over_limit()


SESSION: ContextVar[Session | None] = ContextVar("session", default=None)
"""Context variable with the training response that the running asyncio task works on; None in validation."""


class GenerationAborted(RuntimeError):
    """The engine has aborted a response that the trainer had not cancelled. This uses up one of the response's ``max_retries``."""


class ServerDied(ResponseLost):
    """A rollout server or its engine has died. Its responses are generated again on another server."""


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
        self._server = server
        self._engine = engine
        self._rate = rate
        self._on_death = on_death

    @property
    def generate(self) -> "CancellableServer":
        """This proxy, because verl calls ``server.generate.remote(...)``."""
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
        if session.must_end():  # a multi-turn agent loop wants to begin its next turn
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
        return await cancel_call(call)


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
