"""Rollouts simulated event by event: engines that decode as fast as they are told, driven by the state machines of production.

In every decoding step a replica generates one token for each running request. How long a step takes depends on how many run and how
many tokens the key-value cache holds (:class:`Engine`), so nothing happens between two events (a request ends or is cancelled, the
cache is full), and a response of 16,384 tokens costs no more to simulate than one of ten.

:func:`play_rounds` has :class:`~rl_accel.rollout.tail_batching.TailBatching` decide what is launched and cancelled. With ratios of
1 that is the rollout of a trainer without it, which waits for every response.
"""

import gc
import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rl_accel.reward.adaptive_timeout import AdaptiveTimeout
from rl_accel.rollout.tail_batching import Phase, TailBatching, TailRun
from rl_accel.rollout.tail_decisions import (
    Cancel,
    Decision,
    Launch,
    RequestPrompts,
    RoundEnded,
    RoundMetrics,
    TrainBatch,
)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Engine:
    """How fast one replica of the rollout engine is. All times in seconds.

    Args:
        step_seconds: of a decoding step, by running requests: linear between the given numbers, level below the first, and beyond
            the last with the last slope.
        cached_token_seconds: more for each token in the key-value cache.
        prompt_token_seconds: to read a token of a prompt, or again of a preempted request; all others wait meanwhile.
        request_seconds: of the host's work to start a request; all others wait meanwhile.
        places: requests that run at once; others wait.
        cache_tokens: that the cache holds; when it is full, the request that began last is preempted.

    Raises:
        ValueError: a size or a time is impossible.
    """

    step_seconds: Mapping[int, float]
    cached_token_seconds: float = 0.0
    prompt_token_seconds: float = 0.0
    request_seconds: float = 0.0
    places: int = 1024
    cache_tokens: float = math.inf

    def __post_init__(self) -> None:
        if not self.step_seconds or not min(self.step_seconds.values()) > 0:
            raise ValueError(f"step_seconds must be times above 0 by running requests, found {dict(self.step_seconds)}")
        least = {"places": 1, "cache_tokens": 1}
        for name in ("places", "cache_tokens", "cached_token_seconds", "prompt_token_seconds", "request_seconds"):
            if not getattr(self, name) >= least.get(name, 0):
                raise ValueError(f"{name} must be at least {least.get(name, 0)}, found {getattr(self, name)}")

    def seconds(self, running: npt.ArrayLike) -> Floats:
        """Return the seconds of a step with so many running requests and an empty cache."""
        knots, values = np.array(sorted(self.step_seconds.items()), float).T
        slope = (values[-1] - values[-2]) / (knots[-1] - knots[-2]) if len(knots) > 1 else 0.0
        requests = np.asarray(running, float)
        beyond = np.maximum(requests - knots[-1], 0)
        found: Floats = np.maximum(np.interp(requests, knots, values) + beyond * slope, values.min())
        return found


class Workload(Protocol):
    """What is to be generated. Prompts are numbered from 0 in the order of the data."""

    @property
    def prompt_tokens(self) -> int:
        """Of each prompt."""

    def lengths(self, prompts: Sequence[int], responses: int, rng: np.random.Generator) -> Ints:
        """Draw the tokens of so many new responses of each prompt, shape [P, R], at least 1."""

    def reward_seconds(self, count: int, rng: np.random.Generator) -> Floats | None:
        """Draw how long rewards take, shape [count]; None: no time."""


@dataclass(frozen=True)
class Given:
    """A workload of given lengths, shape [P, R]: each prompt once, in their order, then from the first one again."""

    table: Ints
    prompt_tokens: int = 0

    def lengths(self, prompts: Sequence[int], responses: int, rng: np.random.Generator) -> Ints:
        """Return the first responses of each prompt, shape [P, R]; raises ValueError if more are asked for than are given."""
        if responses > self.table.shape[1]:
            raise ValueError(f"responses must be at most the {self.table.shape[1]} of each prompt, found {responses}")
        return self.table[np.array(prompts) % len(self.table), :responses]

    def reward_seconds(self, count: int, rng: np.random.Generator) -> None:
        """Rewards take no time."""


class _Request:
    """A response in an engine, or waiting there."""

    __slots__ = ("begin", "id", "length", "replica", "runs", "tokens")

    def __init__(self, request_id: int, length: int, replica: "_Replica", tokens: float) -> None:
        self.id, self.length, self.replica, self.tokens = request_id, length, replica, tokens
        self.begin = 0.0  # the replica's steps less its own tokens
        self.runs = False


class _Replica:
    """One engine, advanced to ``time``; it has done ``steps`` decoding steps by then. ``serial`` is that of its next event."""

    __slots__ = (
        *("cached", "count", "engine", "load", "order", "pace", "peak", "preemptions", "prompt"),
        *("queue", "running", "serial", "stall", "steps", "time"),
    )

    def __init__(self, engine: Engine, prompt: int, pace: Sequence[float]) -> None:
        self.engine, self.prompt, self.pace = engine, prompt, pace
        self.running: list[
            tuple[float, int, _Request]
        ] = []  # a heap by the step in which they end; some were cancelled
        self.order: list[_Request] = []  # in which they began
        self.queue: deque[_Request] = deque()
        self.time = self.steps = self.stall = self.cached = self.peak = 0.0
        self.count = self.load = self.preemptions = self.serial = 0

    def next_event(self) -> float:
        """When a request ends or the cache is full; infinity if nothing runs."""
        running = self.running
        while running and not running[0][2].runs:
            heapq.heappop(running)
        if not running:
            return math.inf
        count, cached, engine = self.count, self.cached, self.engine
        steps = running[0][0] - self.steps
        if cached + count * steps > engine.cache_tokens and count > 1:
            steps = max((engine.cache_tokens - cached) / count, 0.0)
        seconds = self.pace[count] + engine.cached_token_seconds * (cached + count * steps / 2)
        return self.time + self.stall + steps * seconds

    def advance(self, now: float) -> None:
        """Decode until ``now``, before which there is no event."""
        left = now - self.time - self.stall
        self.time, self.stall = now, max(-left, 0.0)
        if left > 0 and self.count:
            rate = self.engine.cached_token_seconds
            pace = self.pace[self.count] + rate * self.cached
            steps = 2 * left / (pace + math.sqrt(pace * pace + 2 * rate * self.count * left))
            self.steps += steps
            self.cached += steps * self.count

    def happen(self, now: float) -> _Request | None:
        """Decode until the next event, which is ``now``; return the request that ended, or None if the cache is full."""
        end, _, request = self.running[0]
        count, steps = self.count, end - self.steps
        if self.cached + count * steps > self.engine.cache_tokens and count > 1:
            self.advance(now)
            return None
        self.time, self.stall, self.steps = now, 0.0, end
        self.cached += count * steps
        heapq.heappop(self.running)
        self.leave(request, request.length)
        return request

    def leave(self, request: _Request, tokens: float) -> None:
        """A request that runs is over, after ``tokens`` tokens."""
        if self.cached > self.peak:
            self.peak = self.cached
        request.runs = False
        self.count -= 1
        self.cached -= self.prompt + tokens
        if self.queue:
            self.fill()

    def fill(self) -> None:
        """Start what waits, as far as there are places and there is cache."""
        engine, queue = self.engine, self.queue
        if not self.count:  # numbers stay small, and what was cancelled is forgotten
            self.steps = self.cached = 0.0
            self.running.clear()
            self.order.clear()
        began = len(self.order)
        while queue and self.count < engine.places:
            request = queue[0]
            needed = self.prompt + request.tokens
            if self.count and self.cached + needed > engine.cache_tokens:
                break
            queue.popleft()
            self.stall += engine.request_seconds + needed * engine.prompt_token_seconds
            self.cached += needed
            self.count += 1
            request.begin = self.steps - request.tokens
            request.runs = True
            self.order.append(request)
        new = [(request.begin + request.length, request.id, request) for request in self.order[began:]]
        if len(new) > len(self.running):
            self.running += new
            heapq.heapify(self.running)
        else:
            for entry in new:
                heapq.heappush(self.running, entry)

    def preempt(self) -> _Request:
        """Put the request that began last back into the queue, as a new object, and return that."""
        while not self.order[-1].runs:
            self.order.pop()
        last = self.order.pop()
        again = _Request(last.id, last.length, self, self.steps - last.begin)
        self.preemptions += 1
        waiting, self.queue = self.queue, deque()
        self.leave(last, again.tokens)
        self.queue = waiting
        self.queue.appendleft(again)
        return again


class Cluster:
    """Replicas of an engine, and what runs on them. A new request goes to the replica with the fewest (verl's balancer).

    ``now`` is the time of the last event, from 0 on. Raises ValueError if there is no replica.
    """

    def __init__(self, engine: Engine, replicas: int, prompt_tokens: int = 0) -> None:
        if replicas < 1:
            raise ValueError(f"replicas must be at least 1, found {replicas}")
        pace = engine.seconds(np.arange(engine.places + 1)).tolist()
        self._replicas = [_Replica(engine, prompt_tokens, pace) for _ in range(replicas)]
        self._requests: dict[int, _Request] = {}
        self._heap: list[tuple[float, int, _Replica]] = []  # next events, by time and serial number; some are outdated
        self._serial = 0
        self.now = 0.0

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def preemptions(self) -> int:
        """So far, of all replicas."""
        return sum(replica.preemptions for replica in self._replicas)

    def take_peak_tokens(self) -> float:
        """Return the most tokens that a replica's cache held since the last call."""
        peak = max(replica.peak for replica in self._replicas)
        for replica in self._replicas:
            replica.peak = replica.cached
        return peak

    def launch(self, ids: Sequence[int], lengths: Sequence[int], tokens: Sequence[float] | None = None) -> None:
        """Start requests of these ``lengths``. ``tokens``: how many of each are there already and are only read again."""
        if not self._requests:
            self._heap.clear()
        loads = [(replica.load, index) for index, replica in enumerate(self._replicas)]
        heapq.heapify(loads)
        for request_id, length, had in zip(ids, lengths, tokens or [0.0] * len(ids), strict=True):
            load, index = loads[0]
            heapq.heapreplace(loads, (load + 1, index))
            replica = self._replicas[index]
            request = self._requests[request_id] = _Request(request_id, length, replica, had)
            replica.queue.append(request)
        for load, index in loads:
            replica = self._replicas[index]
            if load > replica.load:
                replica.load = load
                replica.advance(self.now)
                replica.fill()
                self._schedule(replica)

    def cancel(self, ids: Iterable[int]) -> list[int]:
        """Stop requests that are under way; return the tokens of each."""
        touched: dict[_Replica, None] = {}
        tokens = []
        for request_id in ids:
            request = self._requests.pop(request_id)
            replica = request.replica
            if replica not in touched:
                touched[replica] = None
                replica.advance(self.now)
            replica.load -= 1
            had = request.tokens
            if request.runs:
                had = replica.steps - request.begin
                replica.leave(request, had)
            else:
                replica.queue.remove(request)
            tokens.append(round(had))
        for replica in touched:
            self._schedule(replica)
        return tokens

    def next_event(self) -> float:
        """When something happens next; infinity if nothing runs."""
        heap = self._heap
        while heap and heap[0][1] != heap[0][2].serial:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def happen(self) -> _Request | None:
        """Let the next event happen, of which there must be one; return the request that ended, if one did."""
        self.now = now = self.next_event()
        replica = self._heap[0][2]
        ended = replica.happen(now)
        if ended is None:
            again = replica.preempt()
            self._requests[again.id] = again
        else:
            replica.load -= 1
            del self._requests[ended.id]
        self._schedule(replica, heapq.heapreplace)
        return ended

    def _schedule(self, replica: _Replica, put: Callable[..., object] = heapq.heappush) -> None:
        self._serial += 1
        replica.serial = self._serial
        put(self._heap, (replica.next_event(), self._serial, replica))


@dataclass(slots=True)
class Round:
    """One rollout.

    Attributes:
        metrics: of the state machine; ``rollout_seconds`` and tokens are there.
        ends: seconds after which each response that ran to its end was generated, ascending.
        peak_tokens: most tokens in the cache of a replica.
        preemptions: of all replicas.
        unfinished: responses that were cancelled when the batch was complete.
    """

    metrics: RoundMetrics = field(default_factory=lambda: RoundMetrics(0, "short", 1.0))
    ends: list[float] = field(default_factory=list)
    peak_tokens: float = 0.0
    preemptions: int = 0
    unfinished: int = 0


def play_rounds(
    run: TailRun,
    engine: Engine,
    replicas: int,
    workload: Workload,
    rounds: int,
    seed: int = 0,
    timeout: AdaptiveTimeout | None = None,
    ends: bool = False,
) -> list[Round]:
    """Play rounds of :class:`TailBatching`, one after the other, and return them. The same ``seed`` gives the same rounds.

    Args:
        run: of the state machine; with ratios of 1 every response is waited for.
        engine, replicas, workload: what generates, and what is generated.
        rounds: how many.
        seed: of what is drawn.
        timeout: the state machine of ``reward_timeout``; a reward that ends within its limit is taken to be of a correct answer.
        ends: the run ends with the last of these rounds, so that no prompt is begun that they could not train.
    """
    play = _Play(TailBatching(run), Cluster(engine, replicas, workload.prompt_tokens), workload, seed, timeout)
    with collecting_seldom():
        played = []
        for number in range(rounds):
            played.append(play.round(rounds - number if ends else 2**40))
            gc.collect(0)  # what is younger than this round: nothing older is garbage
    return played


class _Play:
    """Carries out what the state machine decides, as :class:`~rl_accel.rollout.driver.RolloutDriver` does for a framework."""

    def __init__(
        self, core: TailBatching, cluster: Cluster, workload: Workload, seed: int, timeout: AdaptiveTimeout | None
    ) -> None:
        self._core, self._cluster, self._workload, self._timeout = core, cluster, workload, timeout
        self._rng = np.random.default_rng(seed)
        self._offered = 0
        self._rewards: dict[int, tuple[str, float]] = {}  # prompt and seconds of each response's reward
        self._rewarding: list[tuple[float, int]] = []
        self._generated: dict[int, int] = {}  # tokens of responses whose reward is being computed
        self._round = Round()

    def round(self, steps_left: int) -> Round:
        """Play one round."""
        core, cluster, rewarding = self._core, self._cluster, self._rewarding
        generated, scored = core.response_generated, core.response_scored
        began, preempted, played = cluster.now, cluster.preemptions, Round()
        self._round, ends = played, played.ends
        self._carry_out(core.begin_round(steps_left, began))
        while core.phase is not Phase.BETWEEN_ROUNDS:
            if rewarding and rewarding[0][0] <= cluster.next_event():
                now, response_id = heapq.heappop(rewarding)
                if self._generated.pop(response_id, 0):  # else it was cancelled
                    cluster.now = now
                    self._carry_out(scored(response_id, now))
                continue
            request = cluster.happen()
            if request is None:
                continue
            response_id, now = request.id, cluster.now
            ends.append(now - began)
            if decisions := generated(response_id, request.length):
                self._carry_out(decisions)
            if self._rewards:
                self._generated[response_id] = request.length
                heapq.heappush(rewarding, (now + self._reward_seconds(response_id), response_id))
            elif decisions := scored(response_id, now):
                self._carry_out(decisions)
        played.peak_tokens, played.preemptions = cluster.take_peak_tokens(), cluster.preemptions - preempted
        rewarding.clear()
        self._rewards.clear()
        return played

    def _carry_out(self, decisions: list[Decision]) -> None:
        launches: list[Launch] = []
        cancelled: list[int] = []
        trains = False
        for decision in decisions:
            match decision:
                case Launch():
                    launches.append(decision)
                case Cancel(_, response_ids):
                    cancelled += response_ids
                case RequestPrompts(counts):
                    new = range(self._offered, self._offered + sum(counts.values()))
                    self._offered = new.stop
                    self._carry_out(self._core.offer(dict.fromkeys(map(str, new), ""), self._cluster.now))
                case TrainBatch():
                    trains = True
                case RoundEnded(metrics):
                    self._round.metrics = metrics
        if launches:
            self._launch(launches)
        if cancelled:
            running = [response_id for response_id in cancelled if response_id in self._cluster]
            self._round.unfinished += trains * len(running)
            tokens = dict(zip(running, self._cluster.cancel(running), strict=True))
            tokens |= {i: self._generated.pop(i) for i in cancelled if i in self._generated}
            for response_id, had in tokens.items():
                if ended := self._core.response_aborted(response_id, had):
                    self._carry_out(ended)

    def _launch(self, launches: Sequence[Launch]) -> None:
        ids = [response_id for launch in launches for response_id in launch.response_ids]
        prompts = [int(launch.prompt_id) for launch in launches]
        lengths = self._workload.lengths(prompts, len(launches[0].response_ids), self._rng)
        seconds = self._workload.reward_seconds(len(ids), self._rng)
        if seconds is not None:
            keys = np.repeat([launch.prompt_id for launch in launches], lengths.shape[1]).tolist()
            self._rewards |= dict(zip(ids, zip(keys, seconds.tolist(), strict=True), strict=True))
        self._cluster.launch(ids, lengths.ravel().tolist())

    def _reward_seconds(self, response_id: int) -> float:
        key, seconds = self._rewards[response_id]
        if self._timeout is None:
            return seconds
        limit = self._timeout.limit(key).wall
        self._timeout.record(key, min(seconds, limit), min(seconds, limit), seconds <= limit)
        return min(seconds, limit)


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Switch Python's collector of reference cycles off."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
