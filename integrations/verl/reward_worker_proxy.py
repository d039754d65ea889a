"""Proxies of verl's reward workers: a call is cancelled together with the awaiting task, and a dead worker is replaced.

verl itself keeps sending prompts to a dead reward worker, and all these prompts fail.
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
"""Maximum number of attempts to score a response. A response that kills each worker must fail in the end."""
_PAUSE_SECONDS = 1.0
_STOP_SECONDS = 30.0
"""Maximum seconds to wait for a cancelled call to end."""

SUCCESSOR = "_successor_"
"""Separator between worker number and number of deaths in the names of replacement reward workers."""


async def cancel(call: Awaitable[T]) -> T | None:
    """Cancels the remote call of an async actor and waits for its end. Returns the result, or None if there is none.

    Cancelling an asyncio task that awaits the call would leave the call running.
    """
    call.cancel() if hasattr(call, "cancel") else ray.cancel(call)  # balance's calls are asyncio tasks
    return await outcome(call)


async def outcome(call: Awaitable[T]) -> T | None:
    """Waits for the end of the call, up to ``_STOP_SECONDS``. Returns the result, or None if there is none."""
    task = asyncio.ensure_future(call)
    await asyncio.wait({task}, timeout=_STOP_SECONDS)
    if not task.done():
        words = "rl-accel: a cancelled remote call has not ended after %.0f s; going on without it"
        logger.warning(words, _STOP_SECONDS)
        task.cancel()
        return None
    return None if task.cancelled() or task.exception() is not None else task.result()


class RewardWorkerProxy:
    """A reward worker whose ``compute_score`` call is cancelled together with the awaiting task.

    Args:
        worker: handle of the actor.
        successor: returns the handle of a dead worker's replacement, given the number of deaths so far.
    """

    def __init__(self, worker: RewardLoopWorker, successor: Callable[[int], RewardLoopWorker]) -> None:
        self._worker = worker
        self._successor = successor
        self._deaths = 0

    @property
    def compute_score(self) -> "RewardWorkerProxy":
        return self

    async def remote(self, data: Any) -> Any:
        """Returns the worker's result. If the worker dies, its replacement is asked.

        Raises:
            RayActorError: all :data:`ATTEMPTS` attempts have failed.
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
                if isinstance(error, ActorUnavailableError):  # the worker may come back
                    await asyncio.sleep(_PAUSE_SECONDS)
                elif worker is self._worker:  # otherwise already replaced for another response
                    logger.warning("rl-accel: a reward worker has died and is replaced: %s", str(error).splitlines()[0])
                    self._deaths += 1
                    self._worker = self._successor(self._deaths)


def proxies(workers: Sequence[Any] | None, config: Any) -> list[RewardWorkerProxy] | None:
    """Returns a proxy for each reward worker of a job, in order; existing proxies are kept.

    A dead worker is replaced by a new actor, under the same name in all agent-loop workers. With a reward model, whose address a
    new actor would not know, another worker takes over.

    Args:
        workers: handles of verl's ``RewardLoopWorker`` actors, or proxies; None if agent loops compute no rewards.
        config: verl's configuration.
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
    # A new name: under the old name, Ray would still return the dead actor's handle.
    return (
        ray.remote(reward_loop.RewardLoopWorker)
        .options(name=name, get_if_exists=True, scheduling_strategy=here)
        .remote(config, None)
    )
