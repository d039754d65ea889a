"""An agent loop whose limit of tokens rises within a run, as curricula for long reasoning have it."""

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class Rising(SingleTurnAgentLoop):
    """Responses to the first ``prompts`` rows of the data end after ``short`` tokens at the latest, later ones where verl says."""

    def __init__(self, *args: Any, prompts: int, short: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prompts, self._short = prompts, short

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        if kwargs["extra_info"]["index"] < self._prompts:
            sampling_params = {**sampling_params, "max_tokens": self._short}
        return await super().run(sampling_params, **kwargs)
