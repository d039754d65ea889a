"""What judging did in a rollout, among slime's own numbers of it."""

import asyncio
import concurrent.futures
import logging
from collections.abc import Iterator
from typing import Any

from rl_accel.integrations.slime.reward_timeout.judging import OPEN

logger = logging.getLogger("rl_accel")

PREFIX = "rl_accel/reward_timeout/"
_PATIENCE_SECONDS = 5.0


def numbers_of(_rollout: Any) -> dict[str, float]:
    """Return what was counted since the last call, for slime's log."""
    return {f"{PREFIX}{name}": amount for name, amount in take_counts().items()}


_late: "dict[asyncio.AbstractEventLoop, concurrent.futures.Future[dict[str, float]]]" = {}
"""Answers that had not come when they were wanted. They go out with the next rollout."""


def take_counts() -> dict[str, float]:
    """Return what was counted since the last call; ``anchors`` is how many are known."""
    total: dict[str, float] = {}
    for loop, grading in list(OPEN.items()):
        for counts in _counts_of(loop, grading) if loop.is_running() else ():
            for name, amount in counts.items():
                known = total.get(name, 0.0)
                total[name] = max(known, amount) if name == "anchors" else known + amount
    return total


def _counts_of(loop: asyncio.AbstractEventLoop, grading: Any) -> Iterator[dict[str, float]]:
    try:
        if loop in _late:
            yield _late[loop].result(_PATIENCE_SECONDS)
        _late[loop] = asyncio.run_coroutine_threadsafe(_take(grading), loop)
        yield _late[loop].result(_PATIENCE_SECONDS)
    except concurrent.futures.TimeoutError:
        logger.warning("rl-accel: the store of reward anchors does not answer; its numbers are late by a rollout")
        return
    except Exception as error:  # numbers are not worth a training
        logger.warning("rl-accel: no numbers of this rollout's rewards: %r", error)
    del _late[loop]


async def _take(grading: Any) -> dict[str, float]:
    if grading.store_client is None:
        delta = grading.replica.take_delta()
        return {**delta.counts, "anchors": float(len(grading.replica.timeout))}
    from rl_accel.integrations.ray.reward_anchors import anchor_store

    await grading.flush()
    handle = anchor_store(grading.anchors_path, grading.replica.timeout.settings)
    counts: dict[str, float] = await handle.take_counts.remote()
    return counts
