"""Event-driven simulation of rollouts: engines with a given decoding speed, controlled by the state machines of production.

In each decoding step, a replica generates one token for each running request. The duration of a step depends on the number of
running requests and on the number of tokens in the key-value cache (:class:`Engine`). The simulation jumps from event to event (a
request ends or is cancelled, the cache is full), so a response of 16,384 tokens costs no more than a response of ten tokens.

In :func:`play_rounds`, :class:`~rl_accel.rollout.tail_batching.TailBatching` decides which requests to launch and to cancel. Ratios
of 1 simulate a trainer without tail batching, which waits for every response.
"""

import gc
import heapq
import math
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import cycle, islice, repeat
from operator import attrgetter
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
MANY = 2**40


@dataclass(frozen=True)
class Engine:
    """Speed and capacity of one replica of the rollout engine. All times are in seconds.

    Args:
        step_seconds: duration of a decoding step, by number of running requests. Linear between the given numbers, constant below
            the first; the last slope continues beyond the last.
        cached_token_seconds: additional duration of a step for each token in the key-value cache.
        prompt_token_seconds: time to prefill one token of a prompt or of a preempted request; all others wait meanwhile.
        request_seconds: host time to start a request; all others wait meanwhile.
        response_seconds: host time when a response has ended; all others wait meanwhile.
        places: slots, the maximum number of running requests; others wait.
        cache_tokens: capacity of the key-value cache; when it is full, the request that started last is preempted.

    Raises:
        ValueError: a size is below 1, a time is negative, or ``step_seconds`` are not above 0.
    """

    step_seconds: Mapping[int, float]
    cached_token_seconds: float = 0.0
    prompt_token_seconds: float = 0.0
    request_seconds: float = 0.0
    response_seconds: float = 0.0
    places: int = 1024
    cache_tokens: float = math.inf

    def __post_init__(self) -> None:
        if not self.step_seconds or not min(self.step_seconds.values()) > 0:
            raise ValueError(f"step_seconds must be times above 0 by running requests, found {dict(self.step_seconds)}")
        least = {"places": 1, "cache_tokens": 1}
        for field_ in fields(self)[1:]:
            found, wanted = getattr(self, field_.name), least.get(field_.name, 0)
            if not found >= wanted:
                raise ValueError(f"{field_.name} must be at least {wanted}, found {found}")

    def seconds(self, running: npt.ArrayLike) -> Floats:
        """Returns the duration of a step in seconds, by number of running requests, with an empty cache."""
        knots, values = np.array(sorted(self.step_seconds.items()), float).T
        slope = (values[-1] - values[-2]) / (knots[-1] - knots[-2]) if len(knots) > 1 else 0.0
        requests = np.asarray(running, float)
        beyond = np.maximum(requests - knots[-1], 0)
        found: Floats = np.maximum(np.interp(requests, knots, values) + beyond * slope, values.min())
        return found


class Workload(Protocol):
    """Source of response lengths and reward times. Prompts are numbered from 0 in the order of the data."""

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens in each prompt."""

    def lengths(self, prompts: Sequence[int], responses: int, rng: np.random.Generator) -> Ints:
        """Draws the lengths of ``responses`` new responses per prompt, in tokens, shape [P, R], at least 1."""

    def reward_seconds(self, count: int, rng: np.random.Generator) -> Floats | None:
        """Draws the durations of ``count`` rewards in seconds, shape [count]; None if rewards take no time."""


@dataclass(frozen=True)
class Given:
    """A workload of given lengths, shape [P, R]. The prompts come in order; the first follows again after the last."""

    table: Ints
    prompt_tokens: int = 0

    def lengths(self, prompts: Sequence[int], responses: int, rng: np.random.Generator) -> Ints:
        """Returns the lengths of the first ``responses`` responses of each prompt; raises ValueError if fewer are given."""
        if responses > self.table.shape[1]:
            raise ValueError(f"responses must be at most the {self.table.shape[1]} of each prompt, found {responses}")
        return self.table[np.array(prompts) % len(self.table), :responses]

    def reward_seconds(self, count: int, rng: np.random.Generator) -> None:
        """Returns None: rewards take no time."""


class Request:
    """A response in an engine. A waiting request has ``tokens`` tokens so far, and ``began`` is 0.

    For a running request, ``began`` is its start number (from 1 on), and ``end`` is the step of its replica at which it ends.
    """

    __slots__ = ("began", "end", "id", "length", "replica", "tokens")

    end: float

    def __init__(self, request_id: int, length: int, replica: "_Replica", tokens: float) -> None:
        self.id, self.length, self.replica, self.tokens, self.began = request_id, length, replica, tokens, 0


_by_end, _by_begin = attrgetter("end"), attrgetter("began")


class _Replica:
    """One engine, advanced to ``time``, after ``steps`` decoding steps.

    The next event is ``ahead`` steps away and has the number ``serial``: a request ends, or the cache is full (``fills``).
    """

    __slots__ = (
        *("ahead", "begun", "cached", "engine", "fills", "pace", "peak", "preemptions", "prompt", "queue", "rate"),
        *("room", "running", "serial", "stall", "steps", "time"),
    )

    def __init__(self, engine: Engine, prompt: int, pace: Sequence[float]) -> None:
        self.engine, self.prompt, self.pace = engine, prompt, pace
        self.rate, self.room = engine.cached_token_seconds, engine.cache_tokens
        self.running: list[Request] = []  # sorted by end, the latest first
        self.queue: deque[Request] = deque()
        self.time = self.steps = self.stall = self.cached = self.peak = self.ahead = 0.0
        self.begun = self.preemptions = self.serial = 0
        self.fills = False

    def next_event(self) -> float:
        """Returns the time of the next event; infinity if nothing runs."""
        running, cached = self.running, self.cached
        if not running:
            return math.inf
        count = len(running)
        ahead = running[-1].end - self.steps
        self.fills = cached + count * ahead > self.room and count > 1
        if self.fills:
            ahead = max((self.room - cached) / count, 0.0)
        self.ahead = ahead
        return self.time + self.stall + ahead * (self.pace[count] + self.rate * (cached + count * ahead / 2))

    def advance(self, now: float) -> None:
        """Decodes until ``now``; the next event must not be earlier."""
        left = now - self.time - self.stall
        self.time, self.stall = now, max(-left, 0.0)
        if left > 0 and self.running:
            count, rate = len(self.running), self.rate
            pace = self.pace[count] + rate * self.cached
            steps = 2 * left / (pace + math.sqrt(pace * pace + 2 * rate * count * left))
            self.steps += steps
            self.cached += steps * count

    def happen(self, now: float) -> Request:
        """Decodes until the next event, at ``now``; returns the request that ended or, if the cache is full, was preempted."""
        running = self.running
        self.time, self.stall = now, 0.0
        self.steps += self.ahead
        cached = self.cached + self.ahead * len(running)
        if cached > self.peak:
            self.peak = cached
        if not self.fills:
            request = running.pop()
            self.stall = self.engine.response_seconds
            self.cached = cached - (self.prompt + request.length)
            if self.queue:
                self.start()
            return request
        self.cached = cached
        request = max(running, key=_by_begin)
        request.tokens = request.length - (request.end - self.steps)
        self.stop(request, request.tokens)
        self.preemptions += 1
        self.queue.appendleft(request)
        return request

    def stop(self, request: Request, tokens: float) -> None:
        """Stops a running request after ``tokens`` tokens."""
        self.running.remove(request)
        self.peak = max(self.peak, self.cached)
        self.cached -= self.prompt + tokens
        request.began = 0

    def start(self) -> None:
        """Starts waiting requests while there are free slots and there is room in the cache."""
        engine, queue, running, prompt = self.engine, self.queue, self.running, self.prompt
        cached, stall, steps, begun = self.cached, self.stall, self.steps, self.begun
        host, reading = engine.request_seconds, engine.prompt_token_seconds
        for request in islice(queue, engine.places - len(running)):
            needed = prompt + request.tokens
            if running and cached + needed > self.room:
                break
            running.append(request)
            begun += 1
            stall += host + needed * reading
            cached += needed
            request.began, request.end = begun, steps + request.length - request.tokens
        for _ in range(begun - self.begun):
            queue.popleft()
        self.cached, self.stall, self.begun = cached, stall, begun
        running.sort(key=_by_end, reverse=True)


class Cluster:
    """Replicas of an engine with their requests. ``now`` is the time of the last event in seconds, from 0 on.

    A new request goes to the replica with the fewest requests (verl's balancer). Another router is a subclass that
    overrides :meth:`launch` to choose ``replicas``, and :meth:`happen` to learn which requests ended.

    Raises:
        ValueError: ``replicas`` is below 1.
    """

    def __init__(self, engine: Engine, replicas: int, prompt_tokens: int = 0) -> None:
        if replicas < 1:
            raise ValueError(f"replicas must be at least 1, found {replicas}")
        pace = engine.seconds(np.arange(engine.places + 1)).tolist()
        self._replicas = [_Replica(engine, prompt_tokens, pace) for _ in range(replicas)]
        self._requests: dict[int, Request] = {}
        self._heap: list[tuple[float, int, _Replica]] = []  # next events, by time and serial number; some are outdated
        self._serial = 0
        self.now = 0.0

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def loads(self) -> list[int]:
        """Number of running and waiting requests of each replica."""
        return [len(replica.running) + len(replica.queue) for replica in self._replicas]

    @property
    def preemptions(self) -> int:
        """Number of preemptions so far, over all replicas."""
        return sum(replica.preemptions for replica in self._replicas)

    def take_peak_tokens(self) -> float:
        """Returns the highest number of tokens in any replica's cache since the last call."""
        peak = max(replica.peak for replica in self._replicas)
        for replica in self._replicas:
            replica.peak = replica.cached
        return peak

    def tokens_of(self, request_id: int) -> float:
        """Returns the number of tokens that an unfinished request has so far."""
        request = self._requests[request_id]
        if not request.began:
            return request.tokens
        request.replica.advance(self.now)
        return request.length - (request.end - request.replica.steps)

    def launch(
        self,
        ids: Sequence[int],
        lengths: Sequence[int],
        tokens: Sequence[float] | None = None,
        prompts: Sequence[int] | None = None,
        replicas: Iterable[int] | None = None,
    ) -> None:
        """Starts requests.

        Args:
            ids, lengths: id and final number of tokens of each request.
            tokens: number of tokens that each request already has; the engine only prefills these tokens.
            prompts: prompt of each request, for routers that need it.
            replicas: index of the replica for each request.
        """
        if not self._requests:
            self._heap.clear()
            for replica in self._replicas:  # keeps these numbers small
                replica.steps = replica.cached = replica.stall = 0.0
        if replicas is None:
            fewest = self._fewest() if any(self.loads) else cycle(range(len(self._replicas)))
            replicas = islice(fewest, len(ids))
        chosen = [self._replicas[index] for index in replicas]
        for request_id, length, begun, replica in zip(
            ids, lengths, tokens or repeat(0.0, len(ids)), chosen, strict=True
        ):
            request = self._requests[request_id] = Request(request_id, length, replica, begun)
            replica.queue.append(request)
        for replica in dict.fromkeys(chosen):
            replica.advance(self.now)
            self._go_on(replica)

    def _fewest(self) -> Iterator[int]:
        """Yields replica indices endlessly, fewest requests first; each yield counts as a new request."""
        loads = [(load, index) for index, load in enumerate(self.loads)]
        heapq.heapify(loads)
        while True:
            load, index = loads[0]
            heapq.heapreplace(loads, (load + 1, index))
            yield index

    def cancel(self, ids: Iterable[int]) -> list[int]:
        """Stops unfinished requests; returns the number of tokens of each."""
        touched: dict[_Replica, None] = {}
        tokens = []
        for request_id in ids:
            had = self.tokens_of(request_id)
            request = self._requests.pop(request_id)
            replica = request.replica
            touched[replica] = None
            if request.began:
                replica.stop(request, had)
            else:
                replica.queue.remove(request)
            tokens.append(round(had))
        for replica in touched:
            self._go_on(replica)
        return tokens

    def next_event(self) -> float:
        """Returns the time of the next event; infinity if nothing runs."""
        heap = self._heap
        while heap and heap[0][1] != heap[0][2].serial:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def happen(self) -> Request | None:
        """Simulates until the next event, which must exist; returns the request that ended, or None after a preemption."""
        heap = self._heap
        while heap[0][1] != heap[0][2].serial:
            heapq.heappop(heap)
        self.now, _, replica = heap[0]
        request = replica.happen(self.now)
        replica.serial = self._serial = self._serial + 1
        heapq.heapreplace(heap, (replica.next_event(), self._serial, replica))
        if not request.began:  # preempted
            return None
        del self._requests[request.id]
        return request

    def _go_on(self, replica: _Replica) -> None:
        """Updates a replica after requests have come or gone."""
        if replica.queue:
            replica.start()
        self._serial = replica.serial = self._serial + 1
        heapq.heappush(self._heap, (replica.next_event(), self._serial, replica))


@dataclass(slots=True)
class Round:
    """Results of one rollout.

    Attributes:
        metrics: metrics of the state machine, with ``rollout_seconds`` and token counts.
        ends: seconds from the start of the round until each complete response was generated, ascending.
        peak_tokens: highest number of tokens in any replica's cache.
        preemptions: number of preemptions over all replicas.
        unfinished: number of responses that were cancelled in an engine when the batch was complete.
    """

    metrics: RoundMetrics = field(default_factory=lambda: RoundMetrics(0, "short", 1.0))
    ends: "array[float]" = field(default_factory=lambda: array("d"))
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
    cluster: type[Cluster] = Cluster,
) -> list[Round]:
    """Simulates consecutive rounds of :class:`TailBatching` and returns the rounds. The same ``seed`` gives the same rounds.

    Args:
        run: parameters of the state machine; with ratios of 1, each round waits for every response.
        engine, replicas, workload: speed of a replica, number of replicas, and source of response lengths.
        rounds: number of rounds.
        seed: seed of all random draws.
        timeout: state machine of ``reward_timeout``; a reward that ends within its limit counts as that of a correct answer.
        ends: whether the run ends with the last round. If so, no prompt is started that these rounds could not train.
        cluster: class of the cluster; a subclass may route requests otherwise.
    """
    player = Player(run, cluster(engine, replicas, workload.prompt_tokens), workload, seed, timeout)
    with collecting_seldom():
        return [player.play(rounds - number if ends else MANY) for number in range(rounds)]


class Player:
    """Carries out decisions of :class:`TailBatching`, as :class:`~rl_accel.rollout.driver.RolloutDriver` does for a framework.

    Attributes:
        cluster: cluster of the next round; may be replaced between two rounds.
    """

    def __init__(
        self, run: TailRun, cluster: Cluster, workload: Workload, seed: int, timeout: AdaptiveTimeout | None = None
    ) -> None:
        self.cluster = cluster
        self._core, self._workload, self._timeout = TailBatching(run), workload, timeout
        self._rng = np.random.default_rng(seed)
        self._offered = 0
        self._rewards: dict[int, tuple[str, float]] = {}  # prompt and reward seconds of each response
        self._rewarding: list[tuple[float, int]] = []
        self._generated: dict[int, int] = {}  # tokens of responses whose reward is being computed
        self._round = Round()

    def play(self, steps_left: int = MANY) -> Round:
        """Simulates one round; ``steps_left`` is the number of remaining training steps, including that of this round."""
        core, cluster, rewarding, rewards = self._core, self.cluster, self._rewarding, self._rewards
        generated, scored, happen = core.response_generated, core.response_scored, cluster.happen
        began, preempted, played, over = cluster.now, cluster.preemptions, Round(), Phase.BETWEEN_ROUNDS
        self._round, ends = played, played.ends
        self._carry_out(core.begin_round(steps_left, began))
        while core.phase is not over:
            if rewarding and rewarding[0][0] <= cluster.next_event():
                now, response_id = heapq.heappop(rewarding)
                if self._generated.pop(response_id, 0):  # 0: cancelled
                    cluster.now = now
                    self._carry_out(scored(response_id, now))
                continue
            if (request := happen()) is None:
                continue
            response_id, now = request.id, cluster.now
            ends.append(now - began)
            if decisions := generated(response_id, request.length):
                self._carry_out(decisions)
            if rewards:
                self._generated[response_id] = request.length
                heapq.heappush(rewarding, (now + self._reward_seconds(response_id), response_id))
            elif decisions := scored(response_id, now):
                self._carry_out(decisions)
        played.peak_tokens, played.preemptions = cluster.take_peak_tokens(), cluster.preemptions - preempted
        rewarding.clear()
        rewards.clear()
        return played

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
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
                    self._carry_out(self._core.offer(dict.fromkeys(map(str, new), ""), self.cluster.now))
                case TrainBatch():
                    trains = True
                case RoundEnded(metrics):
                    self._round.metrics = metrics
        if launches:
            self._launch(launches)
        if cancelled:
            running = [response_id for response_id in cancelled if response_id in self.cluster]
            self._round.unfinished += trains * len(running)
            tokens = dict(zip(running, self.cluster.cancel(running), strict=True))
            tokens |= {i: self._generated.pop(i) for i in cancelled if i in self._generated}
            for response_id, had in tokens.items():
                if ended := self._core.response_aborted(response_id, had):
                    self._carry_out(ended)

    def _launch(self, launches: Sequence[Launch]) -> None:
        ids = [response_id for launch in launches for response_id in launch.response_ids]
        each = len(launches[0].response_ids)
        prompts = [int(launch.prompt_id) for launch in launches]
        lengths = self._workload.lengths(prompts, each, self._rng).ravel().tolist()
        prompts = [prompt for prompt in prompts for _ in range(each)]
        seconds = self._workload.reward_seconds(len(ids), self._rng)
        if seconds is not None:
            self._rewards |= dict(zip(ids, zip(map(str, prompts), seconds.tolist(), strict=True), strict=True))
        self.cluster.launch(ids, lengths, prompts=prompts)

    def _reward_seconds(self, response_id: int) -> float:
        key, seconds = self._rewards[response_id]
        if self._timeout is None:
            return seconds
        limit = self._timeout.limit(key).wall
        self._timeout.record(key, min(seconds, limit), min(seconds, limit), seconds <= limit, seconds > limit)
        return min(seconds, limit)


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Disables cyclic garbage collection inside the block."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
