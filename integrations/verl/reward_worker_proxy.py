"""verl's reward workers as an agent loop sees them: a call ends with the task that awaits it, and a dead worker is replaced.

A reward worker of verl's that dies stays dead and is still asked; every prompt that it is asked about fails then.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import ray
from omegaconf import OmegaConf
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_accel.patches.verl.interfaces import RewardLoopWorker

logger = logging.getLogger("rl_accel")
T = TypeVar("T")

ATTEMPTS = 4
"""How often a response is given to a reward worker before it fails: a response that kills whoever scores it must end."""
_PAUSE_SECONDS = 1.0
_STOP_SECONDS = 30.0
"""How long to wait for a cancelled call to end before going on without it."""

SUCCESSOR = "_successor_"
"""In the names of reward workers that came in place of dead ones, between the number of the worker and that of deaths."""


async def cancel(call: Awaitable[T]) -> T | None:
    """Cancel the remote call of an async actor and wait until it is over; return its result, or None if it has none.

    Cancelling an asyncio task that awaits the call would leave it running.
    """
    call.cancel() if hasattr(call, "cancel") else ray.cancel(call)  # balance's calls are no references
    return await outcome(call)


async def outcome(call: Awaitable[T]) -> T | None:
    """Wait until the call is over; return its result, or None if it has none."""
    task = asyncio.ensure_future(call)
    await asyncio.wait({task}, timeout=_STOP_SECONDS)
    if not task.done():
        words = "rl-accel: a cancelled remote call has not ended after %.0f s; going on without it"
        logger.warning(words, _STOP_SECONDS)
        task.cancel()
        return None
    return None if task.cancelled() or task.exception() is not None else task.result()


class RewardWorkerProxy:
    """A reward worker whose ``compute_score`` is cancelled together with the task that awaits it.

    Args:
        worker: handle of the actor.
        successor: returns the handle of the worker that comes in place of a dead one, given how many have died.
    """

    def __init__(self, worker: RewardLoopWorker, successor: Callable[[int], RewardLoopWorker]) -> None:
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
        attempts = 0
        while True:
            worker = self._worker
            call = worker.compute_score.remote(data)
            attempts += 1
            try:
                return await call
            except asyncio.CancelledError:
                await cancel(call)
                raise
            except RayActorError as error:
                if attempts == ATTEMPTS:
                    raise
                if isinstance(error, ActorUnavailableError):  # it may come back
                    await asyncio.sleep(_PAUSE_SECONDS)
                elif worker is self._worker:  # else another response has found out before
                    logger.warning("rl-accel: a reward worker has died and is replaced: %s", str(error).splitlines()[0])
                    self._deaths += 1
                    self._worker = self._successor(self._deaths)


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
    from verl.experimental.reward_loop import reward_loop

    name = f"reward_loop_worker_{number}{SUCCESSOR}{deaths}_{ray.get_runtime_context().get_job_id()}"
    here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=True)
    # A name of its own: Ray goes on giving out the handle of a dead actor under the name that it had.
    return (
        ray.remote(reward_loop.RewardLoopWorker)
        .options(name=name, get_if_exists=True, scheduling_strategy=here)
        .remote(config, None)
    )
