"""Scheduling of requests in order of arrival, within the number of slots and a budget of key-value cache.

Only the front of the queue is admitted. Only the youngest running request is preempted; it goes back to the front. The running
requests are therefore always the oldest, the oldest request is never preempted and always advances, and no request starves.
A preempted request is readmitted only after other requests have made room, never at once. Each readmission draws a token, so
two requests cannot preempt each other forever without progress.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from rl_accel.lab.cpu_engine.sampling import SamplingParams

HEADROOM = 8
"""Number of decoding steps that the budget must cover, for all running requests and the new one, to admit a request."""


class EngineError(RuntimeError):
    """The engine cannot execute a command in the present state, or a request failed inside the engine."""


@dataclass(frozen=True)
class Generation:
    """Output of a request. ``stop_reason`` is "completed" (end token or length) or "aborted" (tokens so far).

    ``preemptions``: number of times that the request lost its cache to older requests and had to be prefilled again.
    """

    token_ids: list[int]
    logprobs: list[float] | None
    stop_reason: str
    preemptions: int = 0


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine started, current requests (a preempted request is waiting), and key-value cache usage in tokens.

    ``kv_used``: current usage by running requests. ``kv_peak``: maximum usage of a decoding step. ``kv_tokens``: limit; None
    for no limit.
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
    """A request inside the engine, with the output so far."""

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
    """Queue of an engine, with limits on the number and on the key-value cache of the running requests.

    A running request takes one token of cache per token of its prompt and its response so far. Equal prompts are not shared:
    each one counts.

    Args:
        places: maximum number of running requests.
        kv_tokens: key-value cache budget of all running requests together, in tokens; None for no limit.

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
        """Raises ValueError if ``request``, at a length of ``longest`` tokens, exceeds the budget on its own."""
        if self.kv_tokens is not None and longest > self.kv_tokens:
            raise ValueError(
                f"request {request.request_id}: a prompt of {len(request.prompt)} tokens and a response of up to "
                f"{longest - len(request.prompt)} do not fit into kv_tokens={self.kv_tokens}"
            )

    def add(self, request: Request) -> None:
        """Queues a request that has just arrived."""
        self._arrived += 1
        request.arrival = self._arrived
        self.waiting.append(request)

    def next(self, running: Sequence[Request]) -> Request | None:
        """Removes the front request from the queue and returns it if it may join ``running``; otherwise returns None."""
        if not self.waiting or len(running) >= self._places:
            return None
        if self.kv_tokens is not None and running:
            length = sum(request.length for request in running) + self.waiting[0].length
            if length + HEADROOM * (len(running) + 1) > self.kv_tokens:
                return None
        return self.waiting.popleft()

    def preempt(self, running: Sequence[Request]) -> list[int]:
        """Moves the youngest of ``running`` back into the queue until the others fit for a step; returns the rows that stay."""
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
        """Number of requests in the queue that have begun already."""
        return sum(bool(request.tokens) for request in self.waiting)

    def drop(self, chosen: Callable[[Request], bool]) -> list[Request]:
        """Removes the requests for which ``chosen`` is true from the queue and returns these requests."""
        dropped = [request for request in self.waiting if chosen(request)]
        self.waiting = deque(request for request in self.waiting if not chosen(request))
        return dropped
