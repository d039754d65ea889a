"""Agent loops for the end-to-end tests of tail batching: one with two turns, two that kill processes, and one that fails."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import ray
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

OBSERVATION = "4b7"
"""What the environment says between the two turns; it is masked out of training."""


def first_to_come(marker: Path) -> bool:
    """Whether this is the first call with ``marker`` in all processes of the run."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class TwoTurns(SingleTurnAgentLoop):
    """The model writes, is told something, and writes again, on the same server."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        told = self.tokenizer.encode(OBSERVATION, add_special_tokens=False)
        request_id = uuid4().hex
        response: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        output = None
        for turn, budget in enumerate((20, self.response_length - 20 - len(told))):
            if turn:
                response += told
                mask += [0] * len(told)
                logprobs += [0.0] * len(told)
            output = await self.server_manager.generate(
                request_id, prompt_ids=prompt + response, sampling_params={**sampling_params, "max_tokens": budget}
            )
            response += output.token_ids
            mask += [1] * len(output.token_ids)
            logprobs += output.log_probs
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=response,
            response_mask=mask,
            response_logprobs=logprobs,
            num_turns=4,
            metrics=AgentLoopMetrics(),
            extra_fields={**output.extra_fields, "turn_scores": [], "tool_rewards": []},
        )


class KillsServer(SingleTurnAgentLoop):
    """The first time, SIGKILL to the engine of the server named ``server`` while it generates at least two responses."""

    def __init__(self, *args: Any, server: str, folder: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._server = server
        self._marker = Path(folder) / "killed"

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        if first_to_come(self._marker):
            server = ray.get_actor(self._server)
            while await server.__ray_call__.remote(_running) < 2:
                await asyncio.sleep(0.01)
            os.kill(await server.__ray_call__.remote(_engine_pid), signal.SIGKILL)
        return await super().run(sampling_params, **kwargs)


def _running(server: Any) -> int:
    if hasattr(server, "engine"):  # vLLM's
        return len(server.engine.output_processor.request_states)
    return len(server._inflight)


def _engine_pid(server: Any) -> int:
    children = psutil.Process().children(recursive=True)
    return next((child.pid for child in children if "EngineCore" in str(child.as_dict(["cmdline"]))), os.getpid())


class KillsWorker(SingleTurnAgentLoop):
    """The first time, SIGKILL to the process it runs in."""

    def __init__(self, *args: Any, folder: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._marker = Path(folder) / "worker-killed"

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        if first_to_come(self._marker):
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().run(sampling_params, **kwargs)


class Fails(SingleTurnAgentLoop):
    """Raises for every response, or with ``once`` for the first of each prompt."""

    def __init__(self, *args: Any, folder: str, once: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._folder, self._once = Path(folder), once

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        index = kwargs["index"]
        if not self._once or first_to_come(self._folder / f"failed-{index}"):
            raise RuntimeError(f"no tool for row {index}")
        return await super().run(sampling_params, **kwargs)
