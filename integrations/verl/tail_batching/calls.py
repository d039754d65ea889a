"""Remote calls that stop where they run when their caller is cancelled, and text that was cut off never passes for whole.

Cancelling an asyncio task that awaits a Ray reference leaves the remote call running. So an agent loop is handed servers
that cancel the call itself and wait until it is over.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import RayActorError, RayError

from rl_accel.integrations.ray.cancellation import cancel, outcome
from rl_accel.integrations.verl.tail_batching.session import SESSION, TOKEN_RATE, Session

_ABORTED = ("aborted", "abort")


class GenerationAborted(RuntimeError):
    """The engine cut a response off that nobody had cancelled. It is generated again."""


class ServerDied(RuntimeError):
    """The process of a rollout server is gone. What it was generating is generated again elsewhere."""


class CancellableServer:
    """A rollout server whose ``generate`` is cancelled together with the task that awaits it; it counts tokens as well.

    Args:
        server: handle of the server actor.
        aborts_by_id: whether its ``abort_request`` works and lets ``generate`` return the tokens so far.
        on_death: awaited, with what Ray says, before a call to a dead server raises.
    """

    def __init__(self, server: Any, aborts_by_id: bool, on_death: Callable[[str], Awaitable[None]]) -> None:
        self._server = server
        self._aborts_by_id = aborts_by_id
        self._on_death = on_death

    @property
    def generate(self) -> "CancellableServer":
        return self

    async def remote(self, **request: Any) -> Any:
        """Return the server's ``TokenOutput``.

        Raises:
            GenerationAborted: the engine aborted it although it is a training response that was not cancelled.
            ServerDied: the server's process is gone.
        """
        session = SESSION.get()
        if session is not None and session.cancelled:  # a loop of several turns
            raise asyncio.CancelledError
        call = self._server.generate.remote(**request)
        began = time.perf_counter()
        try:
            output = await self._wait(call, session)
        except RayActorError as error:
            line = str(error).strip().splitlines()[0]
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
        if self._aborts_by_id:
            try:
                if (await self._server.abort_request.remote(request_id))["aborted"]:
                    return await outcome(call)
            except RayError:  # the server is gone, and the call with it
                return None
        return await cancel(call)
