"""An agent loop whose response length the test sets."""

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class Exactly(SingleTurnAgentLoop):
    """Every response has ``tokens`` tokens."""

    def __init__(self, *args: Any, tokens: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tokens = tokens

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        return await super().run({**sampling_params, "max_tokens": self._tokens, "ignore_eos": True}, **kwargs)
