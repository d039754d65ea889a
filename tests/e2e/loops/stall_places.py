"""An agent loop with a tool that does not answer, and a data set that blocks, until a file in the run's folder exists."""

import asyncio
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall
from verl.utils.dataset.rl_dataset import RLHFDataset

FOLDER = Path(os.environ["STALL_FOLDER"])
BLOCKED_ROW = int(os.environ["STALL_BLOCKED_ROW"])


class Search:
    """A tool that answers once the file ``tool`` exists."""

    async def create(self, create_kwargs: dict[str, Any]) -> tuple[None, None]:
        return None, None

    async def execute(self, *_: Any, **_kwargs: Any) -> None:
        while not (FOLDER / "tool").exists():
            await asyncio.sleep(0.1)
        raise RuntimeError("the search has no result")


class Searches(SingleTurnAgentLoop):
    """Calls the tool by verl's own method, and then answers as ever."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        caller: Any = SimpleNamespace(tools={"search": Search()}, max_tool_response_length=100)
        call = FunctionCall(name="search", arguments="{}")
        await ToolAgentLoop._call_tool(caller, call, {}, SimpleNamespace(request_id="of-this-test"))
        return await super().run(sampling_params, **kwargs)


class BlockingDataset(RLHFDataset):
    """Returns one row only once the file ``data`` exists."""

    def __getitem__(self, row: int) -> Any:
        while row == BLOCKED_ROW and not (FOLDER / "data").exists():
            time.sleep(0.1)
        return super().__getitem__(row)
