"""verl's reward workers as an agent loop sees them: a call ends with the task that awaits it, and a dead worker is replaced.

A reward worker of verl's that dies stays dead and is still asked; every prompt that it is asked about fails then.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray
from omegaconf import OmegaConf
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_accel.integrations.ray.cancellation import cancel

logger = logging.getLogger("rl_accel")

ATTEMPTS = 4
"""How often a response is given to a reward worker before it fails: a response that kills whoever scores it must end."""
_PAUSE_SECONDS = 1.0

SUCCESSOR = "_successor_"
"""In the names of reward workers that came in place of dead ones, between the number of the worker and that of deaths."""


class RewardWorkerProxy:
    """A reward worker whose ``compute_score`` is cancelled together with the task that awaits it.

    Args:
        worker: handle of the actor.
        successor: returns the handle of the worker that comes in place of a dead one, given how many have died.
    """

    def __init__(self, worker: Any, successor: Callable[[int], Any] | None = None) -> None:
        self._worker = worker
        self._successor = successor
        self._deaths = 0

    @property
    def compute_score(self) -> "RewardWorkerProxy":
        return self

    async def remote(self, data: Any) -> Any:
        """Return what the worker does. If it dies, its successor is asked.

        Raises:
            RayActorError: several workers have died over this response.
        """
        for attempt in range(1, ATTEMPTS + 1):
            worker = self._worker
            call = worker.compute_score.remote(data)
            try:
                return await call
            except asyncio.CancelledError:
                await cancel(call)
                raise
            except ActorUnavailableError:  # it may come back
                if attempt == ATTEMPTS:
                    raise
                await asyncio.sleep(_PAUSE_SECONDS)
            except RayActorError as error:
                if self._successor is None or attempt == ATTEMPTS:
                    raise
                if worker is self._worker:  # else another response has found out before
                    logger.warning("rl-accel: a reward worker has died and is replaced: %s", str(error).splitlines()[0])
                    self._deaths += 1
                    self._worker = self._successor(self._deaths)
        raise AssertionError("unreachable")


def proxies(workers: Sequence[Any] | None, config: Any) -> list[RewardWorkerProxy] | None:
    """Return a proxy of each reward worker of a job, in order; those that are proxies stay as they are.

    A dead one is made anew, under a name that all agent loops know. With a reward model, whose address a new one would not know,
    its work goes to another.

    Args:
        workers: handles of verl's ``RewardLoopWorker`` actors, or proxies; None if agent loops compute no rewards.
        config: verl's.
    """
    if workers is None:
        return None
    return [
        worker
        if isinstance(worker, RewardWorkerProxy)
        else RewardWorkerProxy(worker, partial(_successor, n, workers, config))
        for n, worker in enumerate(workers)
    ]


def _successor(number: int, workers: Sequence[Any], config: Any, deaths: int) -> Any:
    if OmegaConf.select(config, "reward.reward_model.enable", default=False):
        return random.choice([worker for n, worker in enumerate(workers) if n != number] or workers)
    from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

    here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=True)
    # A name of its own: Ray goes on giving out the handle of a dead actor under the name that it had.
    return (
        ray.remote(RewardLoopWorker)
        .options(name=f"reward_loop_worker_{number}{SUCCESSOR}{deaths}", get_if_exists=True, scheduling_strategy=here)
        .remote(config, None)
    )
