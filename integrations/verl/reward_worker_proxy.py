"""Calls of an agent-loop worker to verl's reward workers.

A proxy cancels a remote call together with the awaiting task, and replaces a dead worker. Without proxies, verl keeps sending
responses to a dead reward worker, and none of them gets a reward. :class:`ValidationTag` marks validation responses.
"""

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Coroutine, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import ray
from omegaconf import OmegaConf
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_accel.errors import first_line
from rl_accel.integrations.ray.calls import cancel_call
from rl_accel.integrations.verl.agent_loop import WorkerPart
from rl_accel.patches.verl.interfaces import RewardLoopWorker

logger = logging.getLogger("rl_accel")

ATTEMPTS = 4
"""Maximum number of attempts to score a response. Limited, because a response may kill every worker that scores it."""
_PAUSE_SECONDS = 1.0  # before the next attempt if Ray cannot reach the reward worker, which may come back

SUCCESSOR = "_successor_"
"""Part of the name of an actor that replaces a dead reward worker. ``reward_loop_worker_2_successor_3_<job id>`` is the third
replacement of worker 2."""


class Method:
    """Stands in for a method of a Ray actor: ``remote(...)`` starts the async ``function`` in this process and returns its task."""

    def __init__(self, function: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._function = function

    def remote(self, *args: Any, **kwargs: Any) -> "asyncio.Task[Any]":
        return asyncio.create_task(self._function(*args, **kwargs))


class RewardWorkerProxy:
    """Proxy of a reward worker. Replaces the worker when a call of ``compute_score`` finds it dead.

    All other attributes are those of ``worker``, the worker's handle. ``successor(n)`` returns the handle of the worker that takes
    over after the n-th death.
    """

    def __init__(self, worker: RewardLoopWorker, successor: Callable[[int], RewardLoopWorker]) -> None:
        self._worker = worker
        self._successor = successor
        self._deaths = 0
        self.compute_score = Method(self._compute_score)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy.copy asks before the copy has attributes
            raise AttributeError(name)
        return getattr(self._worker, name)

    async def _compute_score(self, data: Any) -> Any:
        """Computes the score of ``data``, on another worker if the worker dies. A cancellation also cancels the remote call.

        Raises:
            RayActorError: the worker was dead or unavailable in all :data:`ATTEMPTS` attempts.
        """
        for attempt in itertools.count(1):
            worker = self._worker
            call = worker.compute_score.remote(data)
            try:
                return await call
            except asyncio.CancelledError:
                await cancel_call(call)
                raise
            except RayActorError as error:
                if attempt == ATTEMPTS:
                    raise
                if isinstance(error, ActorUnavailableError):  # the worker may come back
                    await asyncio.sleep(_PAUSE_SECONDS)
                elif worker is self._worker:  # otherwise a call for another response has replaced the worker
                    logger.warning("rl-accel: a reward worker has died and is replaced: %s", first_line(error))
                    self._deaths += 1
                    self._worker = self._successor(self._deaths)


def proxies(workers: Sequence[Any] | None, config: Any) -> list[RewardWorkerProxy] | None:
    """Returns a proxy for each of ``workers``, the handles of a job's reward workers. Proxies and None are returned unchanged.

    A dead worker is replaced by a new actor, which all agent-loop workers share. With a reward model, another existing worker takes
    over instead, because a new actor would not know the model's address.
    """
    if workers is None:
        return None
    if any(isinstance(worker, RewardWorkerProxy) for worker in workers):  # two features have asked
        return list(workers)
    return [RewardWorkerProxy(worker, partial(_successor, n, workers, config)) for n, worker in enumerate(workers)]


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


VALIDATION = "__rl_accel_validation__"
"""Name of a column in verl's batch that marks a validation response for a reward worker, which removes the column."""
_validating: ContextVar[bool] = ContextVar("rl_accel_validating", default=False)


class ValidationTag(WorkerPart):
    """Agent-loop worker mixin that marks validation responses, because no time limits are learned from them.

    Also lets another reward worker take over from one that has died.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reward_loop_worker_handles: Any = proxies(self.reward_loop_worker_handles, self.config)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
        before = _validating.set(bool(validate))
        try:
            return await super()._agent_loop_postprocess(output, validate, **kwargs)
        finally:
            _validating.reset(before)

    async def _compute_score(self, outputs: Any, kwargs: dict[str, Any]) -> None:
        if _validating.get():
            kwargs = {**kwargs, VALIDATION: True}  # a copy, so that verl stores no mark
        await super()._compute_score(outputs, kwargs=kwargs)
