"""Ends remote calls that nobody waits for any more. Cancelling an asyncio task that awaits one leaves it running."""

import asyncio
import logging
from typing import Any

import ray

logger = logging.getLogger("rl_accel")

STOP_SECONDS = 30.0
"""How long to wait for a cancelled call to end before going on without it."""


async def cancel(call: Any) -> Any:
    """Cancel the remote call of an async actor and wait until it is over; return its result, or None if it has none."""
    ray.cancel(call)
    return await outcome(call)


async def outcome(call: Any) -> Any:
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
