"""Scheduler of the CPU engine: admits requests in order of arrival, within a number of slots and a budget of key-value cache.

Only the request at the front of the queue is admitted. Only the youngest running request is preempted, and it goes back to the
front of the queue. The running requests are therefore always the oldest. The oldest request is never preempted and always advances,
so no request starves. A preempted request is readmitted only after other requests have made room, never at once. Each readmission
draws a token, so two requests cannot preempt each other forever without progress.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from rl_accel.lab.cpu_engine.sampling import SamplingParams

HEADROOM = 8
"""Number of further tokens of each running request, and of the new request, for which the cache budget must have room when a
request is admitted. Otherwise, a request would soon be preempted again."""


class EngineError(RuntimeError):
    """Error for a command that the engine cannot execute in its present state, or a request that failed inside the engine."""


@dataclass(frozen=True)
class Generation:
    """Output of an ended request.

    Attributes:
        logprobs: log-probability of each token; None if not requested.
        stop_reason: "completed" (an end token or the maximum length was reached) or "aborted" (the tokens so far are returned).
        preemptions: number of times that the request was preempted.
    """

    token_ids: list[int]
    logprobs: list[float] | None
    stop_reason: str
    preemptions: int = 0


@dataclass(frozen=True)
class EngineStats:
    """Counts of an engine since the start, and current numbers of requests.

    Attributes:
        tokens, prefills: numbers of generated tokens and of prefilled sequences.
        completed, aborted, failed: numbers of ended requests by outcome.
        running, waiting: current numbers of requests; a preempted request is waiting.
        preemptions: number of preemptions since the start.
    """

    tokens: int
    prefills: int
    completed: int
    aborted: int
    failed: int
    running: int
    waiting: int
    paused: bool
    preemptions: int


@dataclass
class Request:
    """A request inside the engine, with the part of the response generated so far."""

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
    """Queue of the engine's waiting requests. Limits the number and the key-value cache of running requests.

    A running request takes one token of cache for each token of its prompt and of its response so far.

    Args:
        slots: maximum number of running requests.
        kv_tokens: key-value cache budget of all running requests together, in tokens; None for no limit.

    Raises:
        ValueError: a limit is out of range.
    """

    def __init__(self, slots: int, kv_tokens: int | None = None) -> None:
        if slots < 1:
            raise ValueError(f"max_num_seqs wants at least 1, found {slots}")
        if kv_tokens is not None and (isinstance(kv_tokens, bool) or not isinstance(kv_tokens, int) or kv_tokens < 2):
            raise ValueError(f"kv_tokens wants an integer of at least 2, or None for no limit, found {kv_tokens!r}")
        self._slots = slots
        self.kv_tokens = kv_tokens
        self.waiting: deque[Request] = deque()
        self.preemptions = 0
        self._arrived = 0

    def check_fits(self, request: Request, longest: int) -> None:
        """Raises ValueError if ``request``, with ``longest`` tokens of prompt and response, exceeds the cache budget even alone."""
        if self.kv_tokens is not None and longest > self.kv_tokens:
            raise ValueError(
                f"request {request.request_id}: a prompt of {len(request.prompt)} tokens and a response of up to "
                f"{longest - len(request.prompt)} do not fit into kv_tokens={self.kv_tokens}"
            )

    def add(self, request: Request) -> None:
        """Adds a request that has just arrived to the end of the queue."""
        self._arrived += 1
        request.arrival = self._arrived
        self.waiting.append(request)

    def next(self, running: Sequence[Request]) -> Request | None:
        """Removes and returns the request at the front of the queue; None if slots or cache budget leave no room beside
        ``running``."""
        if not self.waiting or len(running) >= self._slots:
            return None
        if self.kv_tokens is not None and running:
            length = sum(request.length for request in running) + self.waiting[0].length
            if length + HEADROOM * (len(running) + 1) > self.kv_tokens:
                return None
        return self.waiting.popleft()

    def preempt(self, running: Sequence[Request]) -> list[int]:
        """Moves the youngest of the ``running`` requests to the front of the queue until the cache suffices for a decoding step.

        Returns the rows of the requests that keep running.
        """
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
        """Number of preempted requests in the queue."""
        return sum(bool(request.tokens) for request in self.waiting)

    def drop(self, chosen: Callable[[Request], bool]) -> list[Request]:
        """Removes the requests for which ``chosen`` returns True from the queue, and returns them."""
        dropped = [request for request in self.waiting if chosen(request)]
        self.waiting = deque(request for request in self.waiting if not chosen(request))
        return dropped
