"""Ends calls of async Ray actors, and waits for their ends."""

import asyncio
import logging
from collections.abc import Awaitable
from typing import TypeVar

import ray

logger = logging.getLogger("rl_accel")
T = TypeVar("T")

_STOP_SECONDS = 30.0
"""Maximum seconds to wait for the end of a remote call after its cancellation. Chosen by hand."""


async def cancel_call(call: Awaitable[T]) -> T | None:
    """Cancels ``call``, a running call of an async Ray actor or an asyncio task, and returns its :func:`outcome`."""
    call.cancel() if hasattr(call, "cancel") else ray.cancel(call)
    return await outcome(call)


async def outcome(call: Awaitable[T]) -> T | None:
    """Waits up to ``_STOP_SECONDS`` for the result of ``call``. Returns None if the call was cancelled, failed or still runs."""
    task = asyncio.ensure_future(call)
    await asyncio.wait({task}, timeout=_STOP_SECONDS)
    if not task.done():
        words = "rl-accel: a cancelled remote call has not ended after %.0f s; going on without it"
        logger.warning(words, _STOP_SECONDS)
        task.cancel()
        return None
    return None if task.cancelled() or task.exception() is not None else task.result()
