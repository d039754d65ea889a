"""Which requests run: in order of arrival, as many as there are places, within a budget of key-value memory.

Only the front of the queue is admitted, only the youngest running request is preempted, and it goes back to the front. So the
requests that run are at any time the oldest ones, the oldest is never preempted and always advances, and nothing starves.
A preempted request comes back when others have made room, never at once; it draws a token whenever it comes back, so that
no pair of requests can push each other out for ever without either getting longer.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from rl_accel.lab.cpu_engine.sampling import SamplingParams

HEADROOM = 8
"""Decoding steps for which there has to be room, for all that would run then, when a request joins others."""


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

    ``kv_used`` is what the running requests take now, ``kv_peak`` the most that a decoding step took, both in tokens;
    ``kv_tokens`` is the limit, None if there is none.
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


@dataclass
class Request:
    """A request inside the engine, with what it has produced so far."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    future: "Future[Generation]" = field(default_factory=Future)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    arrival: int = 0
    preemptions: int = 0

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)


class Scheduler:
    """The queue of an engine, and the memory that its running requests may take.

    A running request takes as many tokens of key-value memory as its prompt and its response have so far; equal prompts count
    once each.

    Args:
        places: requests that may run together.
        kv_tokens: tokens of key-value memory for all of them together; None for no limit.

    Raises:
        ValueError: a limit is out of range.
    """

    def __init__(self, places: int, kv_tokens: int | None = None) -> None:
        if places < 1:
            raise ValueError(f"max_num_seqs wants at least 1, found {places}")
        if kv_tokens is not None and (isinstance(kv_tokens, bool) or not isinstance(kv_tokens, int) or kv_tokens < 2):
            raise ValueError(f"kv_tokens wants an integer of at least 2, or None for no limit, found {kv_tokens!r}")
        self._places = places
        self.kv_tokens = kv_tokens
        self.waiting: deque[Request] = deque()
        self.preemptions = 0
        self._arrived = 0

    def check_fits(self, request: Request, longest: int) -> None:
        """Raise ValueError if ``request``, at the length of ``longest`` tokens, exceeds the budget all by itself."""
        if self.kv_tokens is not None and longest > self.kv_tokens:
            raise ValueError(
                f"request {request.request_id}: a prompt of {len(request.prompt)} tokens and a response of up to "
                f"{longest - len(request.prompt)} do not fit into kv_tokens={self.kv_tokens}"
            )

    def add(self, request: Request) -> None:
        """Queue a request that has just arrived."""
        self._arrived += 1
        request.arrival = self._arrived
        self.waiting.append(request)

    def next(self, running: Sequence[Request]) -> Request | None:
        """Take the front of the queue if it may join ``running``."""
        if not self.waiting or len(running) >= self._places:
            return None
        if self.kv_tokens is not None and running:
            length = sum(request.length for request in running) + self.waiting[0].length
            if length + HEADROOM * (len(running) + 1) > self.kv_tokens:
                return None
        return self.waiting.popleft()

    def preempt(self, running: Sequence[Request]) -> list[int]:
        """Put the youngest of ``running`` back into the queue until the others fit for a step; return the rows that stay."""
        rows = list(range(len(running)))
        if self.kv_tokens is None:
            return rows
        used = sum(request.length for request in running)
        while used > self.kv_tokens:
            row = max(rows, key=lambda row: running[row].arrival)
            rows.remove(row)
            used -= running[row].length
            running[row].preemptions += 1
            self.preemptions += 1
            self.waiting.appendleft(running[row])
        return rows

    @property
    def preempted(self) -> int:
        """How many requests in the queue have begun already."""
        return sum(bool(request.tokens) for request in self.waiting)

    def drop(self, chosen: Callable[[Request], bool]) -> list[Request]:
        """Take the chosen requests out of the queue and return them."""
        dropped = [request for request in self.waiting if chosen(request)]
        self.waiting = deque(request for request in self.waiting if not chosen(request))
        return dropped
