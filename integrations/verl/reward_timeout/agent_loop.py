"""A part of agent-loop workers: they mark the responses of a validation for the reward workers, and outlive those."""

from contextvars import ContextVar
from typing import Any

from rl_accel.integrations.verl.agent_loop import WorkerPart
from rl_accel.integrations.verl.reward_timeout import VALIDATION
from rl_accel.integrations.verl.reward_worker_proxy import proxies

_VALIDATING: ContextVar[bool] = ContextVar("rl_accel_validating", default=False)


class Marking(WorkerPart):
    """What this feature adds to an agent-loop worker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reward_loop_worker_handles = proxies(self.reward_loop_worker_handles, self.config)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
        before = _VALIDATING.set(bool(validate))
        try:
            return await super()._agent_loop_postprocess(output, validate, **kwargs)
        finally:
            _VALIDATING.reset(before)

    async def _compute_score(self, outputs: Any, kwargs: dict[str, Any]) -> None:
        if _VALIDATING.get():
            kwargs = {**kwargs, VALIDATION: True}  # a copy: what verl stores of the response is not marked
        await super()._compute_score(outputs, kwargs=kwargs)
