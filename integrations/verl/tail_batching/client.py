"""Remote calls that stop where they run when their caller is cancelled, and text that was cut off never passes for whole.

Cancelling an asyncio task that awaits a Ray reference leaves the remote call running. So an agent loop is handed servers and
judges that cancel the call itself and wait until it is over.
"""

import asyncio
import logging
import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from verl.workers.rollout.llm_server import LLMServerClient

logger = logging.getLogger("rl_accel")

STOP_SECONDS = 30.0
"""How long to wait for a cancelled call to end before going on without it."""

ABORTS_BY_ID = ("hf_cpu",)
"""Engines whose ``abort_request`` works; it returns the tokens so far. (vLLM's, as verl 0.9 calls it, looks up ids that
vLLM 0.24 no longer uses.)"""

_ABORTED = ("aborted", "abort")


class GenerationAborted(RuntimeError):
    """The engine cut a response off that nobody had cancelled. It is generated again."""


@dataclass(eq=False)
class Session:
    """A response in the making, in the process that makes it."""

    response_id: int
    task: "asyncio.Task[None] | None" = None
    tokens: int = 0
    keys: tuple[str, ...] = ()
    metric: float | None = None
    storing: bool = False
    cancelled: bool = False


SESSION: ContextVar[Session | None] = ContextVar("session", default=None)
"""The response that the running task works on; None in validation."""


@dataclass
class _Speed:
    """Tokens and seconds of the responses that ran to their end in this process."""

    tokens: int = 0
    seconds: float = 0.0

    def estimate(self, seconds: float) -> int:
        return int(seconds * self.tokens / self.seconds) if self.seconds else 0


_speed = _Speed()


class CancellableJudge:
    """A reward worker whose ``compute_score`` is cancelled together with the task that awaits it."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    @property
    def compute_score(self) -> "CancellableJudge":
        return self

    async def remote(self, data: Any) -> Any:
        call = self._worker.compute_score.remote(data)
        try:
            return await call
        except asyncio.CancelledError:
            await _cancel(call)
            raise


class CancellableServer:
    """A rollout server whose ``generate`` is cancelled together with the task that awaits it; it counts tokens as well."""

    def __init__(self, server: Any, aborts_by_id: bool) -> None:
        self._server = server
        self._aborts_by_id = aborts_by_id

    @property
    def generate(self) -> "CancellableServer":
        return self

    async def remote(self, **request: Any) -> Any:
        session = SESSION.get()
        call = self._server.generate.remote(**request)
        if session is None:
            return await call
        began = time.perf_counter()
        try:
            output = await call
        except asyncio.CancelledError:
            output = await self._stop(call, request["request_id"])
            seconds = time.perf_counter() - began
            session.tokens += _speed.estimate(seconds) if output is None else len(output.token_ids)
            raise
        session.tokens += len(output.token_ids)
        if output.stop_reason in _ABORTED:
            raise GenerationAborted(f"the engine aborted the request after {len(output.token_ids)} tokens")
        _speed.tokens += len(output.token_ids)
        _speed.seconds += time.perf_counter() - began
        return output

    async def _stop(self, call: Any, request_id: str) -> Any:
        """End the call; return what it had generated, or None where that cannot be known."""
        if self._aborts_by_id:
            try:
                if (await self._server.abort_request.remote(request_id))["aborted"]:
                    return await _outcome(call)
            except RayError:  # the server is gone, and the call with it
                return None
        return await _cancel(call)


async def _cancel(call: Any) -> Any:
    ray.cancel(call)
    return await _outcome(call)


async def _outcome(call: Any) -> Any:
    """Wait until the call is over; return its result, or None if it has none."""

    async def result() -> Any:
        return await call

    task = asyncio.ensure_future(result())
    await asyncio.wait({task}, timeout=STOP_SECONDS)
    if not task.done():
        logger.warning(
            "rl-accel: a cancelled remote call has not ended after %.0f s; going on without it", STOP_SECONDS
        )
        task.cancel()
        return None
    return None if task.cancelled() or task.exception() is not None else task.result()


class TailLLMServerClient(LLMServerClient):
    """verl's client for a sync trainer, over servers that stop what is cancelled."""

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        acquiring = asyncio.ensure_future(super()._acquire_server(request_id, **extra))
        try:
            server_id, server = await asyncio.shield(acquiring)
        except asyncio.CancelledError:
            acquiring.add_done_callback(lambda done: self._give_back(done, request_id))
            raise
        return server_id, CancellableServer(server, self.config.actor_rollout_ref.rollout.name in ABORTS_BY_ID)

    def _give_back(self, acquired: "asyncio.Future[tuple[str, Any]]", request_id: str) -> None:
        # Else the load balancer would count a request on this server for ever.
        if not acquired.cancelled() and acquired.exception() is None:
            self._release_server(acquired.result()[0], request_id=request_id)
