"""What the trainer and the agent-loop workers say to each other."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol


@dataclass(frozen=True, slots=True)
class Job:
    """Responses of one prompt to start. ``payload`` is the prompt's row of the data set; ``step`` the training step."""

    prompt_id: str
    payload: dict[str, Any]
    response_ids: tuple[int, ...]
    step: int


@dataclass(frozen=True, slots=True)
class Event:
    """What happened to a response.

    ``generated``, then ``scored``; or ``failed`` or ``aborted``, which a response can become at any time before it is scored.
    Nothing of a failed or aborted response is left in TransferQueue.

    Attributes:
        tokens: generated so far.
        keys: where its trajectories lie in TransferQueue (scored only; more than one if the agent loop had several outputs).
        metric: what group filtering looks at, if it is on and the judge gave it (scored only).
        error: one line (failed only).
    """

    kind: Literal["generated", "scored", "failed", "aborted"]
    response_id: int
    tokens: int = 0
    keys: tuple[str, ...] = ()
    metric: float | None = None
    error: str = ""


class ResponseWorkers(Protocol):
    """What runs responses; see :class:`~rl_accel.integrations.verl.tail_batching.workers.Workers`."""

    def launch(self, job: Job) -> None: ...

    def cancel(self, response_ids: Iterable[int]) -> None: ...

    def begin_round(self) -> None: ...

    def end_round(self) -> None: ...

    def wait(self, seconds: float) -> list[Event]: ...
