"""Gives each generation request of an asyncio task an id, and passes the server's answers to a watcher.

slime sends no request id, so SGLang cannot abort a single request. slime also drops ``num_retractions`` (number of preemptions)
from the answers. A failed request is sent again for a minute, although the router may send each try to the same dead server. The
watcher can end these retries.
"""

import asyncio
from contextvars import ContextVar
from typing import Any, Protocol

from rl_accel.patches.patch import Patch


class RequestWatcher(Protocol):
    """Observer of the generation requests of an asyncio task."""

    def begin(self) -> str:
        """Returns the id for a request that is about to be sent.

        A response may take several requests, one after the other. Raises ``asyncio.CancelledError`` if the response that this task
        generates has been cancelled since the last request.
        """

    def end(self, request_id: str, answer: Any) -> None:
        """Called when a request has ended. ``answer`` is the server's answer; None if the request failed or was cancelled."""

    async def failed(self) -> None:
        """Called when a request has failed. Raises an exception if slime must not send the request again."""


WATCHER: ContextVar[RequestWatcher | None] = ContextVar("watcher", default=None)
"""Watcher of the requests of the current asyncio task; None: the requests stay unchanged."""


def _make(original: Any, _settings: Any) -> Any:
    async def post(url: Any, payload: Any, max_retries: Any = 60, headers: Any = None) -> Any:
        watcher = WATCHER.get()
        if watcher is None or "rid" in payload or not url.endswith("/generate"):
            return await original(url, payload, max_retries, headers=headers)
        request_id = watcher.begin()
        answer = None
        try:
            for tries_left in reversed(range(max(max_retries, 1))):
                try:
                    answer = await original(url, {**payload, "rid": request_id}, 1, headers=headers)
                    return answer
                except Exception:
                    await watcher.failed()
                    if not tries_left:
                        raise
                await asyncio.sleep(1)  # same pause as in slime
        finally:
            watcher.end(request_id, answer)

    return post


SWITCHES = (
    Patch(
        name="slime.requests",
        target="slime.rollout.sglang_rollout:post",
        bindings=("slime.utils.http_utils:post",),
        params=("url", "payload", "max_retries", "headers"),
        make=_make,
        no_seam="a custom generate function would have to repeat the whole of slime's own to add one key to its payload",
        remove_when="a hook may change the payload of a request",
    ),
)
