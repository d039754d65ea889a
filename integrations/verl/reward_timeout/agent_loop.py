"""A part of agent-loop workers: they mark the responses of a validation for the reward workers, and outlive those."""

from contextvars import ContextVar
from typing import Any

from rl_accel.integrations.verl.reward_timeout import VALIDATION
from rl_accel.integrations.verl.reward_timeout.judges import judges
from rl_accel.integrations.verl.reward_timeout.wiring import is_wired

_VALIDATING: ContextVar[bool] = ContextVar("rl_accel_validating", default=False)


class Marking:
    """What this feature adds to an agent-loop worker. Without the feature it only cancels and replaces reward workers."""

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
