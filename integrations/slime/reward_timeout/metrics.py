"""What judging did in a rollout, among slime's own numbers of it."""

import asyncio
import logging
from typing import Any

from slime.observability import logging_utils
from slime.observability.metric_utils import compute_rollout_step

from rl_accel.integrations.slime.reward_timeout.judging import OPEN

logger = logging.getLogger("rl_accel")

PREFIX = "rl_accel/reward_timeout/"
_PATIENCE_SECONDS = 10.0


def log(rollout_id: int, args: Any, samples: Any, rollout_extra_metrics: Any, rollout_time: float) -> bool:
    """slime's ``--custom-rollout-log-function-path``: adds our numbers to those that slime is about to log, and has it go on."""
    numbers = {f"{PREFIX}{name}": amount for name, amount in take_counts().items()}
    if not numbers:
        return False
    if isinstance(rollout_extra_metrics, dict):
        rollout_extra_metrics.update(numbers)
    else:  # a rollout function that returns no metrics
        step = compute_rollout_step(args, rollout_id)
        logging_utils.log(args, {**numbers, "rollout/step": step}, step_key="rollout/step")
    return False


def take_counts() -> dict[str, float]:
    """Return what was counted since the last call; ``anchors`` is how many are known."""
    total: dict[str, float] = {}
    for loop, grading in list(OPEN.items()):
        if not loop.is_running():
            continue
        waiting = asyncio.run_coroutine_threadsafe(_take(grading), loop)
        try:
            counts = waiting.result(_PATIENCE_SECONDS)
        except Exception as error:  # numbers are not worth a training
            waiting.cancel()
            logger.warning("rl-accel: the numbers of reward_timeout are late by a rollout: %r", error)
            continue
        for name, amount in counts.items():
            total[name] = max(total.get(name, 0.0), amount) if name == "anchors" else total.get(name, 0.0) + amount
    return total


async def _take(grading: Any) -> dict[str, float]:
    if grading.line is None:
        news = grading.replica.take_news()
        return {**news.counts, "anchors": float(len(grading.replica.timeout))}
    from rl_accel.integrations.ray.reward_anchors import ledger

    await grading.flush()
    handle = ledger(grading.anchors_path, grading.replica.timeout.settings)
    counts: dict[str, float] = await handle.take_counts.remote()
    return counts
