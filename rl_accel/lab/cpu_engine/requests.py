"""What goes into the CPU engine and what comes out of it."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from rl_accel.lab.cpu_engine.sampling import SamplingParams


class EngineError(RuntimeError):
    """The engine cannot do what was asked in its present state, or a request failed inside it."""


@dataclass(frozen=True)
class Generation:
    """What a request produced. ``stop_reason`` is "completed" (end token or length) or "aborted" (tokens so far).

    ``preemptions`` is how often it lost its memory to an older request and had to be read again.
    """

    token_ids: list[int]
    logprobs: list[float] | None
    stop_reason: str
    preemptions: int = 0


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine started, the requests it holds now (a preempted one waits), and its key-value memory.

    ``kv_used`` is what the running requests take now, ``kv_peak`` the most that a decoding step took since the engine started or
    the peak was last set back, both in tokens; ``kv_tokens`` is the limit, None if there is none.
    """

    tokens: int
    decode_steps: int
    prefills: int
    completed: int
    aborted: int
    failed: int
    running: int
    waiting: int
    paused: bool
    preemptions: int
    kv_tokens: int | None
    kv_used: int
    kv_peak: int

    @property
    def kv_peak_share(self) -> float | None:
        """The peak as a share of the limit; None without one."""
        return None if self.kv_tokens is None else self.kv_peak / self.kv_tokens


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
    arrival: int = 0
    preemptions: int = 0

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)
