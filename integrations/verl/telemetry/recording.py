"""What telemetry adds to agent-loop workers: they note when each response began, was generated and got its reward."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from rl_accel.integrations.verl.agent_loop import WorkerPart
from rl_accel.telemetry import metrics
from rl_accel.telemetry.responses import CANCELLED, COMPLETED, CURRENT, FAILED, Notebook


class Recording(WorkerPart):
    """Notes responses of training; those of a validation are not noted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._notebook = Notebook()
        if hasattr(self.llm_client, "_acquire_server"):
            self.llm_client._acquire_server = _noting_the_server(self.llm_client._acquire_server)

    async def take_responses(self) -> list[tuple[Any, ...]]:
        """See :meth:`~rl_accel.telemetry.responses.Notebook.take`."""
        return self._notebook.take()

    @classmethod
    def attach(cls, manager: Any) -> None:
        """Tell the observer in the trainer process whom to ask for notes."""
        observer = metrics.observer("telemetry")
        if observer is not None:
            observer.attach(manager.config, manager.agent_loop_workers, manager.llm_client)

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> Any:
        run = super()._run_agent_loop
        if trajectory["validate"]:
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
                note.tokens = self.tokens_so_far()
            self._notebook.end(note, outcome)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
        note = CURRENT.get()
        if note is not None:
            note.generated = time.time()
            outputs = output if isinstance(output, list) else [output]
            note.tokens = sum(sum(item.response_mask) for item in outputs)
        return await super()._agent_loop_postprocess(output, validate, **kwargs)

    async def _compute_score(self, outputs: Any, kwargs: dict[str, Any]) -> None:
        await super()._compute_score(outputs, kwargs=kwargs)
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
