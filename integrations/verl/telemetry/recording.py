"""Parts of agent-loop workers and managers: workers note completion times, and the observer in the trainer is told of them."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from rl_accel.integrations.verl.telemetry.wiring import file_of
from rl_accel.telemetry import metrics
from rl_accel.telemetry.responses import CANCELLED, COMPLETED, CURRENT, FAILED, Notebook


class Recording:
    """What this feature adds to an agent-loop worker; without the feature nothing. Responses of a validation are not noted."""

    config: Any
    llm_client: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._notebook = Notebook() if file_of(self.config) is not None else None
        if self._notebook is not None and hasattr(self.llm_client, "_acquire_server"):
            self.llm_client._acquire_server = _noting_the_server(self.llm_client._acquire_server)

    async def take_responses(self) -> list[tuple[Any, ...]]:
        """See :meth:`~rl_accel.telemetry.responses.Notebook.take`."""
        return [] if self._notebook is None else self._notebook.take()

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> Any:
        run: Any = super()._run_agent_loop  # type: ignore[misc]
        if self._notebook is None or trajectory["validate"]:
            return await run(sampling_params, trajectory, **kwargs)
        prompt = kwargs.get("uid", trajectory["sample_index"])  # the legacy trainer keeps the uid to itself
        note = self._notebook.begin(str(prompt))
        before = CURRENT.set(note)
        outcome = FAILED
        try:
            result = await run(sampling_params, trajectory, **kwargs)
            outcome = COMPLETED
            return result
        except asyncio.CancelledError:
            outcome = CANCELLED
            raise
        finally:
            CURRENT.reset(before)
            if note.tokens is None:
                note.tokens = self._tokens_so_far()
            self._notebook.end(note, outcome)

    def _tokens_so_far(self) -> int | None:
        """Tokens of a response that ends before it is whole, if they are known."""
        return None

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
        note = CURRENT.get()
        if note is not None:
            note.generated = time.time()
            outputs = output if isinstance(output, list) else [output]
            note.tokens = sum(sum(item.response_mask) for item in outputs)
        return await super()._agent_loop_postprocess(output, validate, **kwargs)  # type: ignore[misc]

    async def _compute_score(self, outputs: Any, kwargs: dict[str, Any]) -> None:
        await super()._compute_score(outputs, kwargs=kwargs)  # type: ignore[misc]
        note = CURRENT.get()
        if note is not None:
            note.rewarded = time.time()


def _noting_the_server(acquire: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def acquire_server(request_id: str, **extra: Any) -> Any:
        server_id, server = await acquire(request_id, **extra)
        note = CURRENT.get()
        if note is not None:
            note.server = str(server_id)
        return server_id, server

    return acquire_server


class Observed:
    """What this feature adds to a manager of agent loops, which lives in the trainer process."""

    config: Any
    agent_loop_workers: Any
    llm_client: Any

    async def _init_agent_loop_workers(self) -> None:
        await super()._init_agent_loop_workers()  # type: ignore[misc]
        observer = metrics.observer("telemetry")
        if observer is not None and file_of(self.config) is not None:
            observer.attach(self.config, self.agent_loop_workers, self.llm_client)
