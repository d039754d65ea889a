"""Agent-loop workers that mark the responses of a validation for the reward workers, and outlive those."""

from contextvars import ContextVar
from typing import Any

import ray
from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopWorker
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from rl_accel.integrations.verl.reward_timeout import VALIDATION
from rl_accel.integrations.verl.reward_timeout.judges import judges
from rl_accel.integrations.verl.reward_timeout.wiring import is_wired

_VALIDATING: ContextVar[bool] = ContextVar("rl_accel_validating", default=False)

# verl exports the class already wrapped by @ray.remote, which cannot be subclassed.
_WorkerTQ: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__


class _Marking:
    """What both workers below add to verl's. Without the feature it only cancels and replaces reward workers."""

    config: Any
    reward_loop_worker_handles: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.reward_loop_worker_handles is not None:
            self.reward_loop_worker_handles = judges(self.reward_loop_worker_handles, self.config)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
        before = _VALIDATING.set(bool(validate))
        try:
            return await super()._agent_loop_postprocess(output, validate, **kwargs)  # type: ignore[misc]
        finally:
            _VALIDATING.reset(before)

    async def _compute_score(self, outputs: Any, kwargs: dict[str, Any]) -> None:
        if is_wired(self.config) and _VALIDATING.get():
            kwargs = {**kwargs, VALIDATION: True}  # a copy: what verl stores of the response is not marked
        await super()._compute_score(outputs, kwargs=kwargs)  # type: ignore[misc]


class RewardTimeoutAgentLoopWorker(_Marking, _WorkerTQ):
    """verl's V1 worker, marking."""


class LegacyRewardTimeoutAgentLoopWorker(_Marking, AgentLoopWorker):
    """verl's worker for the legacy trainer, marking."""


class RewardTimeoutAgentLoopManager(AgentLoopManagerTQ):
    """verl's V1 manager over workers that mark."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(RewardTimeoutAgentLoopWorker)


class LegacyRewardTimeoutAgentLoopManager(AgentLoopManager):
    """verl's manager for the legacy trainer over workers that mark."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.agent_loop_workers_class = ray.remote(LegacyRewardTimeoutAgentLoopWorker)
        super().__init__(*args, **kwargs)
