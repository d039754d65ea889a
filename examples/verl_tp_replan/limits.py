"""An agent loop whose limit of response tokens rises during a run, as in a curriculum for long reasoning."""

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class Rising(SingleTurnAgentLoop):
    """Limits responses to the first ``prompts`` rows of the data to ``short`` tokens. Later responses have verl's limit."""

    def __init__(self, *args: Any, prompts: int, short: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prompts, self._short = prompts, short

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        if kwargs["extra_info"]["index"] < self._prompts:
            sampling_params = {**sampling_params, "max_tokens": self._short}
        return await super().run(sampling_params, **kwargs)
