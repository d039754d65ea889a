"""Names the requests of a task, so that an engine can be told to stop one of them, and shows their answers to whoever watches.

slime sends no request id of its own, without which SGLang cannot be told what to abort, and it drops ``num_retractions``. It sends
a request that failed again for a minute, which a router gives to the same dead server each time: whoever watches may end that.
"""

import asyncio
from contextvars import ContextVar
from typing import Any, Protocol

from rl_accel.patches.patch import Patch


class Watcher(Protocol):
    """Watches the generation requests of a task."""

    def begin(self) -> str:
        """Return the id of a request that is about to be sent. May raise ``asyncio.CancelledError``."""

    def end(self, request_id: str, answer: Any) -> None:
        """The request is over; ``answer`` is what the server said, None if it failed or was cancelled."""

    async def failed(self) -> None:
        """The request, or a try of it, failed. It is sent again, as often as slime would; unless this raises."""


WATCHER: ContextVar[Watcher | None] = ContextVar("watcher", default=None)
"""Who watches the running task. Without one, slime's requests go out as they are."""


def _make(original: Any, _settings: Any) -> Any:
    async def post(url: Any, payload: Any, max_retries: Any = 60, headers: Any = None) -> Any:
        watcher = WATCHER.get()
        if watcher is None or "rid" in payload or not url.endswith("/generate"):
            return await original(url, payload, max_retries, headers=headers)
        request_id, answer = watcher.begin(), None
        try:
            for tries_left in reversed(range(max(max_retries, 1))):
                try:
                    answer = await original(url, {**payload, "rid": request_id}, 1, headers=headers)
                    return answer
                except Exception:
                    await watcher.failed()
                    if not tries_left:
                        raise
                await asyncio.sleep(1)  # as slime does
        finally:
            watcher.end(request_id, answer)

    return post


SWITCHES = (
    Patch(
        name="slime.requests",
        target="slime.rollout.sglang_rollout:post",
        bindings=("slime.utils.http_utils:post",),
        supports="",
        params=("url", "payload", "max_retries", "headers"),
        make=_make,
        no_seam="a custom generate function would have to repeat the whole of slime's own to add one key to its payload",
        remove_when="a hook may change the payload of a request",
    ),
)
