"""What goes into the CPU engine and what comes out of it."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from rl_accel.integrations.cpu_engine.sampling import SamplingParams


class EngineError(RuntimeError):
    """The engine cannot do what was asked in its present state, or a request failed inside it."""


@dataclass(frozen=True)
class Generation:
    """What a request produced. ``stop_reason`` is "completed" (end token or length) or "aborted" (tokens so far)."""

    token_ids: list[int]
    logprobs: list[float] | None
    stop_reason: str


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine started, and the requests it holds now."""

    tokens: int
    decode_steps: int
    prefills: int
    completed: int
    aborted: int
    failed: int
    running: int
    waiting: int
    paused: bool


@dataclass
class Request:
    """A request inside the engine, with what it has produced so far."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    future: "Future[Generation]" = field(default_factory=Future)
    watch: Callable[[int, float], None] | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)
