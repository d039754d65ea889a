"""Scheduler of the CPU engine: admits requests in order of arrival, within a number of slots and a budget of key-value cache.

Only the request at the front of the queue is admitted. Only the youngest running request is preempted, and it goes back to the
front of the queue. The running requests are therefore always the oldest. The oldest request is never preempted and always advances,
so no request starves. A preempted request is readmitted only after other requests have made room, never at once. Each readmission
draws a token, so two requests cannot preempt each other forever without progress.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count

from rl_accel.lab.cpu_engine.sampling import SamplingParams

HEADROOM = 8
"""A request joins others only if the cache has room for this number of further tokens of each of them and itself. With less room, a
request would soon be preempted. Chosen by hand."""


class EngineError(RuntimeError):
    """Error for a command that does not fit the state of the engine, or for a request that failed inside the engine."""


@dataclass(frozen=True)
class Generation:
    """Output of an ended request.

    Attributes:
        logprobs: log-probability of each token; None if not requested.
        stop_reason: "completed" (by an end token or the maximum length), or "aborted" (the tokens so far are returned).
        preemptions: number of times that the request was preempted.
    """

    token_ids: list[int]
    logprobs: list[float] | None
    stop_reason: str
    preemptions: int = 0


@dataclass(frozen=True)
class EngineStats:
    """Numbers of generated tokens, prefilled sequences, preemptions, and ended requests since the start of an engine.

    ``running`` and ``waiting`` are the current numbers of requests. A preempted request counts as waiting.
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
    arrival: int = 0
    preemptions: int = 0

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)


class Scheduler:
    """Queue of the engine's waiting requests. At most ``slots`` requests run, and their tokens stay within ``kv_tokens``.

    ``kv_tokens`` is the cache budget: maximum number of tokens (prompts and responses so far) of all running requests together;
    None for no limit. Raises ValueError if a limit is out of range.
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
        self._arrivals = count(1)

    def add(self, request: Request) -> None:
        request.arrival = next(self._arrivals)
        self.waiting.append(request)

    def next(self, running: Sequence[Request]) -> Request | None:
        """Removes and returns the first request of the queue; None if the ``running`` requests leave no slot or cache for it."""
        if not self.waiting or len(running) >= self._slots:
            return None
        if self.kv_tokens is not None and running:
            length = sum(request.length for request in running) + self.waiting[0].length
            if length + HEADROOM * (len(running) + 1) > self.kv_tokens:
                return None
        return self.waiting.popleft()

    def preempt(self, running: Sequence[Request]) -> list[int]:
        """Moves the youngest ``running`` requests to the front of the queue until the cache budget suffices for a decoding step.

        Returns the indices of the requests that keep running.
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

    def drop(self, requests: Sequence[Request]) -> None:
        """Removes ``requests`` from the queue. Requests that are not in the queue are ignored."""
        self.waiting = deque(request for request in self.waiting if request not in requests)
