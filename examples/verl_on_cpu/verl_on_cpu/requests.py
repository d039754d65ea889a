"""Requests of the CPU engine, their outputs, and the engine's counters."""

from concurrent.futures import Future
from dataclasses import dataclass, field

from verl_on_cpu.sampling import SamplingParams


class EngineError(RuntimeError):
    """Error for a command that does not fit the state of the engine, or for a request that failed inside the engine."""


@dataclass(frozen=True)
class Generation:
    """Output of an ended request.

    Attributes:
        logprobs: log-probability of each token; None if not requested.
        stop_reason: "completed" (by an end token or the maximum length), or "aborted" (the tokens so far are returned).
    """

    token_ids: list[int]
    logprobs: list[float] | None
    stop_reason: str


@dataclass(frozen=True)
class EngineStats:
    """Numbers of generated tokens, prefilled sequences, and ended requests since the start of an engine.

    ``running`` and ``waiting`` are the current numbers of requests.
    """

    tokens: int
    prefills: int
    completed: int
    aborted: int
    failed: int
    running: int
    waiting: int
    paused: bool


@dataclass(eq=False)
class Request:
    """A request inside the engine, with the part of the response generated so far."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    future: "Future[Generation]" = field(default_factory=Future)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)
