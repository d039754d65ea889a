"""Proxies of verl's reward workers. They cancel a remote call together with the awaiting task, and replace a dead worker.

Without proxies, verl keeps sending prompts to a dead reward worker, and all these prompts fail.
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

from rl_accel.errors import first_line
from rl_accel.patches.verl.interfaces import RewardLoopWorker

logger = logging.getLogger("rl_accel")
T = TypeVar("T")

ATTEMPTS = 4
"""Maximum number of attempts to score a response."""
_PAUSE_SECONDS = 1.0
_STOP_SECONDS = 30.0
"""Maximum seconds to wait for the end of a remote call after its cancellation."""

SUCCESSOR = "_successor_"
"""Separator in the name of the actor that replaces a dead reward worker. ``reward_loop_worker_2_successor_3_<job id>`` is the third
replacement of worker 2."""


async def cancel(call: Awaitable[T]) -> T | None:
    """Cancels ``call``, a remote call to an async Ray actor, and waits until the call has ended. Returns as :func:`outcome`."""
    # With the balance feature, a call is an asyncio task, which has a method ``cancel``.
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


class RewardWorkerProxy:
    """Proxy of a reward worker. Cancelling a task that awaits ``compute_score`` also cancels the remote call.

    Calls of other methods go directly to the reward worker.

    Args:
        worker: handle of the reward worker, a Ray actor.
        successor: function that takes the number of deaths so far and returns the handle of the dead worker's replacement.
    """

    def __init__(self, worker: RewardLoopWorker, successor: Callable[[int], RewardLoopWorker]) -> None:
        self._worker = worker
        self._successor = successor
        self._deaths = 0

    @property
    def compute_score(self) -> "RewardWorkerProxy":
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self._worker, name)

    async def remote(self, data: Any) -> Any:
        """Scores ``data`` in the reward worker and returns the result. If the worker dies, a replacement scores ``data``.

        Raises:
            RayActorError: the worker was dead or unavailable in all :data:`ATTEMPTS` attempts.
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
                elif worker is self._worker:  # otherwise a call for another response has replaced the worker
                    logger.warning("rl-accel: a reward worker has died and is replaced: %s", first_line(error))
                    self._deaths += 1
                    self._worker = self._successor(self._deaths)


def proxies(workers: Sequence[Any] | None, config: Any) -> list[RewardWorkerProxy] | None:
    """Returns a proxy for each of a job's reward workers, in the same order; None if ``workers`` is None.

    A dead worker is replaced by a new actor, which all agent-loop workers share. With a reward model, another existing worker takes
    over instead.

    Args:
        workers: handles of verl's ``RewardLoopWorker`` actors. Existing proxies in this list are kept. None if agent loops compute
            no rewards.
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
        # A new actor would not know the address of the reward model.
        return random.choice([worker for n, worker in enumerate(workers) if n != number] or workers)
    from verl.experimental.reward_loop import reward_loop

    name = f"reward_loop_worker_{number}{SUCCESSOR}{deaths}_{ray.get_runtime_context().get_job_id()}"
    same_node = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=True)
    # The name is new, because Ray would still return the dead actor's handle for the old name.
    return (
        ray.remote(reward_loop.RewardLoopWorker)
        .options(name=name, get_if_exists=True, scheduling_strategy=same_node)
        .remote(config, None)
    )
