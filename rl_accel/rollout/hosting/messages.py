"""What a host and its workers say to each other."""

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
    Nothing of a failed or aborted response is left anywhere.

    Attributes:
        tokens: generated so far.
        result: what the response is to the workers' framework (scored only); the host only hands it on.
        error: one line (failed only).
    """

    kind: Literal["generated", "scored", "failed", "aborted"]
    response_id: int
    tokens: int = 0
    result: Any = None
    error: str = ""


class ResponseWorkers(Protocol):
    """What runs responses."""

    def launch(self, job: Job) -> None:
        """Start responses with the current weights."""

    def cancel(self, response_ids: Iterable[int]) -> None:
        """Stop responses wherever they are. Each is reported as aborted, unless it was over already."""

    def begin_round(self) -> None:
        """Get ready: the weights of this round are in place."""

    def end_round(self) -> None:
        """The batch is complete and all else is cancelled: stop it as fast as possible."""

    def wait(self, seconds: float) -> list[Event]:
        """Return what has happened since the last call; nothing after ``seconds`` without an event."""
