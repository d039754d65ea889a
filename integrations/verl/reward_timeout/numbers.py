"""Brings what reward processes have counted to the trainer's logger, once a step, which also has the anchors saved."""

import logging

import ray
from ray.exceptions import RayError

from rl_accel.integrations.ray.reward_anchors import NAME

logger = logging.getLogger("rl_accel")

PATIENCE_SECONDS = 5.0
COUNTS = (
    "executions",
    "correct",
    "timeouts",
    "timeouts_full",
    "killed",
    "cancelled",
    "probes",
    "errors",
    "seconds",
    "waited_seconds",
    "saved_seconds",
    "eval_executions",
    "eval_errors",
    "workers_replaced",
    "reward_workers_lost",
    "store_unreachable",
)


class Collector:
    """Asks the job's store of anchors, in the trainer process. An answer that does not come costs the numbers of one step."""

    def __init__(self) -> None:
        self._incarnation = ""

    def __call__(self) -> dict[str, float]:
        """Return the numbers since the last call by name, ``reward_timeout/executions``; {} before there are any.

        Besides the counts of :class:`~rl_accel.reward.limited_executor.LimitedExecutor`: ``errors``, functions that gave no
        score; ``anchors``, how many are known; ``workers_replaced``, processes of graders that died;
        ``reward_workers_lost``, reward workers that died and were replaced; ``store_restarts``, 1 if the
        store is another than at the last call; ``store_unreachable``, how often it did not answer.
        """
        if not ray.is_initialized():
            return {}
        try:
            handle = ray.get_actor(NAME)
            counts, incarnation = ray.get(
                [handle.take_counts.remote(), handle.incarnation.remote()], timeout=PATIENCE_SECONDS
            )
        except (RayError, ValueError) as error:  # ValueError: there is no actor of that name
            if not self._incarnation:
                return {}
            logger.warning("rl-accel: no numbers of this step's rewards: %s", str(error).splitlines()[:1])
            return {"reward_timeout/store_unreachable": 1.0}
        restarts = float(bool(self._incarnation) and incarnation != self._incarnation)
        self._incarnation = incarnation
        named = {**dict.fromkeys(COUNTS, 0.0), **counts, "store_restarts": restarts}
        return {f"reward_timeout/{name}": value for name, value in named.items()}
