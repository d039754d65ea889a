"""Agent-loop worker mixin that marks validation responses, because reward time limits are not learned from validation."""

from contextvars import ContextVar
from typing import Any

from rl_accel.integrations.verl.agent_loop import WorkerPart
from rl_accel.integrations.verl.reward_worker_proxy import proxies

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
