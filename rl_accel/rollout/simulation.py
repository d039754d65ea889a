"""Event-driven simulation of rollouts: simulated engines, controlled by the same state machines as real engines.

In each decoding step, a replica of the engine generates one token for each running request. The simulation does not visit each
step: it jumps from event to event (a request ends or is cancelled, the key-value cache is full). Long responses therefore take no
longer to simulate than short ones.

In :func:`play_rounds`, :class:`~rl_accel.rollout.tail_batching.TailBatching` decides which requests to launch and to cancel. With
``prompt_ratio`` and ``response_ratio`` of 1, the simulation shows a trainer without tail batching, which waits for every response.
"""

import heapq
import math
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter

import numpy as np
import numpy.typing as npt

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
from rl_accel.rollout.workload import Floats, Lengths

_ENDLESS_STEPS = 2**40
"""Value of ``steps_left`` for a simulated training run without end: so large that the run never comes near its last step."""


@dataclass(frozen=True)
class EngineModel:
    """Speed and capacity of one replica of the rollout engine. All times are in seconds.

    Args:
        step_seconds: duration of a decoding step, by number of running requests. Between the given numbers, the duration is linear.
            Below the first number, it is constant. Above the last number, the last slope continues.
        cached_token_seconds: additional duration of a step for each token in the key-value cache.
        prompt_token_seconds: time to prefill one token of a prompt or of a preempted request. All requests wait meanwhile.
        slots: maximum number of running requests. Further requests wait in a queue.
        cache_tokens: capacity of the key-value cache in tokens. When the cache is full, the request that started last is preempted.

    Raises:
        ValueError: ``slots``, ``cache_tokens`` or a key of ``step_seconds`` is below 1, a time is negative, or a value of
            ``step_seconds`` is not finite and above 0.
    """

    step_seconds: Mapping[int, float]
    cached_token_seconds: float = 0.0
    prompt_token_seconds: float = 0.0
    slots: int = 1024
    cache_tokens: float = math.inf

    def __post_init__(self) -> None:
        is_right = [running >= 1 and 0 < seconds < math.inf for running, seconds in self.step_seconds.items()]
        if not is_right or not all(is_right):
            form = "finite times above 0 by numbers of running requests from 1"
            raise ValueError(f"step_seconds must be {form}, found {dict(self.step_seconds)}")
        for field_ in fields(self)[1:]:
            found = getattr(self, field_.name)
            least = 1 if field_.name in ("slots", "cache_tokens") else 0
            if not found >= least:
                raise ValueError(f"{field_.name} must be at least {least}, found {found}")

    def seconds(self, running: npt.ArrayLike) -> Floats:
        """Returns the duration of a decoding step in seconds for each number of running requests, with an empty key-value cache."""
        knots, values = np.array(sorted(self.step_seconds.items()), float).T
        slope = (values[-1] - values[-2]) / (knots[-1] - knots[-2]) if len(knots) > 1 else 0.0
        requests = np.asarray(running, float)
        beyond = np.maximum(requests - knots[-1], 0)
        found: Floats = np.maximum(np.interp(requests, knots, values) + beyond * slope, values.min())
        return found


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A response of ``length`` tokens in a simulated engine.

    Attributes:
        tokens: number of tokens when the request last began to wait.
        began: number of the request in the order of starts on its replica, from 1; 0: the request waits.
        end: number of the decoding step at which a running request ends.
    """

    id: int
    length: int
    replica: "_Replica"
    tokens: float = 0.0
    began: int = 0
    end: float = 0.0


_by_end = attrgetter("end")
_by_begin = attrgetter("began")
_by_due = attrgetter("due")


class _Replica:
    """One simulated replica of the engine at the time ``time`` in seconds, after ``steps`` decoding steps.

    The next event comes after ``ahead`` more steps: the key-value cache is full (``fills`` is True), or a request ends. For
    ``stall`` seconds from ``time`` on, the replica does other work than decoding, such as prefill. ``due`` is the time of the next
    event in seconds.
    """

    def __init__(self, engine: EngineModel, prompt: int, pace: Sequence[float]) -> None:
        self.engine = engine
        self.prompt = prompt
        self.pace = pace
        self.running: list[SimulatedRequest] = []  # sorted by end, the latest end first
        self.queue: deque[SimulatedRequest] = deque()
        self.time = self.steps = self.stall = self.cached = self.ahead = 0.0
        self.begun = self.preemptions = 0
        self.fills = False
        self.due = math.inf

    def plan(self) -> None:
        """Computes when the next request ends or the cache is full; never if no request runs."""
        count = len(self.running)
        if not count:
            self.due = math.inf
            return
        ahead = self.running[-1].end - self.steps
        capacity = self.engine.cache_tokens
        self.fills = self.cached + count * ahead > capacity and count > 1
        if self.fills:
            ahead = max((capacity - self.cached) / count, 0.0)
        self.ahead = ahead
        cached_on_average = self.cached + count * ahead / 2
        step_seconds = self.pace[count] + self.engine.cached_token_seconds * cached_on_average
        self.due = self.time + self.stall + ahead * step_seconds

    def advance(self, now: float) -> None:
        """Decodes until the time ``now``, which must not be later than the next event."""
        seconds_left = now - self.time - self.stall
        self.time = now
        self.stall = max(-seconds_left, 0.0)
        if seconds_left > 0 and self.running:
            count = len(self.running)
            # Steps slow down as the cache fills: seconds_left = first_step * steps + slower * steps**2 / 2, solved for steps.
            first_step = self.pace[count] + self.engine.cached_token_seconds * self.cached
            slower = self.engine.cached_token_seconds * count
            steps = 2 * seconds_left / (first_step + math.sqrt(first_step**2 + 2 * slower * seconds_left))
            self.steps += steps
            self.cached += steps * count

    def happen(self) -> SimulatedRequest:
        """Decodes until the next event. Ends or preempts a request, and returns this request."""
        self.time = self.due
        self.stall = 0.0
        self.steps += self.ahead
        self.cached += self.ahead * len(self.running)
        if not self.fills:
            request = self.running.pop()
            self.cached -= self.prompt + request.length
            if self.queue:
                self.start()
            return request
        request = max(self.running, key=_by_begin)
        request.tokens = request.length - (request.end - self.steps)
        self.stop(request, request.tokens)
        self.preemptions += 1
        self.queue.appendleft(request)
        return request

    def stop(self, request: SimulatedRequest, tokens: float) -> None:
        """Removes a running request that has generated ``tokens`` tokens."""
        self.running.remove(request)
        self.cached -= self.prompt + tokens
        request.began = 0

    def start(self) -> None:
        """Starts waiting requests while there are free slots and room in the key-value cache."""
        engine = self.engine
        running = self.running
        while self.queue and len(running) < engine.slots:
            needed = self.prompt + self.queue[0].tokens
            if running and self.cached + needed > engine.cache_tokens:
                break
            request = self.queue.popleft()
            running.append(request)
            self.begun += 1
            self.stall += needed * engine.prompt_token_seconds
            self.cached += needed
            request.began = self.begun
            request.end = self.steps + request.length - request.tokens
        running.sort(key=_by_end, reverse=True)


class Cluster:
    """Simulated replicas of an engine, and the requests on them. ``now`` is the time of the last event in seconds, from 0 on.

    A new request goes to the replica with the fewest requests, as in stock verl.

    Raises:
        ValueError: ``replicas`` is below 1.
    """

    def __init__(self, engine: EngineModel, replicas: int, prompt_tokens: int = 0) -> None:
        if replicas < 1:
            raise ValueError(f"replicas must be at least 1, found {replicas}")
        pace = engine.seconds(np.arange(engine.slots + 1)).tolist()
        self._replicas = [_Replica(engine, prompt_tokens, pace) for _ in range(replicas)]
        self._requests: dict[int, SimulatedRequest] = {}
        self.now = 0.0

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def preemptions(self) -> int:
        """Number of preemptions so far, over all replicas."""
        return sum(replica.preemptions for replica in self._replicas)

    def _tokens_of(self, request_id: int) -> float:
        """Returns the number of tokens of an unfinished request so far."""
        request = self._requests[request_id]
        if not request.began:
            return request.tokens
        request.replica.advance(self.now)
        return request.length - (request.end - request.replica.steps)

    def launch(self, ids: Sequence[int], lengths: Sequence[int]) -> None:
        """Adds requests. ``lengths`` are their final numbers of tokens."""
        if not self._requests:
            for replica in self._replicas:  # keeps these sums small, because large floats are less exact
                replica.steps = replica.cached = replica.stall = 0.0
        loads = [len(replica.running) + len(replica.queue) for replica in self._replicas]
        chosen: dict[_Replica, None] = {}
        for request_id, length in zip(ids, lengths, strict=True):
            index = loads.index(min(loads))
            loads[index] += 1
            replica = self._replicas[index]
            request = SimulatedRequest(request_id, length, replica)
            self._requests[request_id] = request
            replica.queue.append(request)
            chosen[replica] = None
        for replica in chosen:
            replica.advance(self.now)
            self._go_on(replica)

    def cancel(self, ids: Iterable[int]) -> list[int]:
        """Removes unfinished requests. Returns the number of tokens of each of them so far, in the order of ``ids``."""
        touched: dict[_Replica, None] = {}
        tokens = []
        for request_id in ids:
            had = self._tokens_of(request_id)
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
        """Returns the time of the next event on any replica; infinity if no request runs."""
        return min(replica.due for replica in self._replicas)

    def happen(self) -> SimulatedRequest | None:
        """Advances the simulation to the next event on any replica. At least one request must run.

        Returns the request that ended; None if a request was preempted.
        """
        replica = min(self._replicas, key=_by_due)
        self.now = replica.due
        request = replica.happen()
        replica.plan()
        if not request.began:  # preempted
            return None
        del self._requests[request.id]
        return request

    def _go_on(self, replica: _Replica) -> None:
        """Starts waiting requests on a replica and plans its next event, after requests were added or removed."""
        if replica.queue:
            replica.start()
        replica.plan()


@dataclass(slots=True)
class Round:
    """Results of one simulated round of tail batching.

    Attributes:
        preemptions: number of preemptions over all replicas.
        unfinished: number of responses that were still in an engine when the batch was complete, and were cancelled.
        ends: seconds from the start of the round to the last token of each completely generated response, ascending.
    """

    metrics: RoundMetrics = field(default_factory=RoundMetrics)
    preemptions: int = 0
    unfinished: int = 0
    ends: "array[float]" = field(default_factory=lambda: array("d"))


def play_rounds(
    run: TailRun,
    engine: EngineModel,
    replicas: int,
    workload: Lengths,
    rounds: int,
    seed: int = 0,
) -> list[Round]:
    """Simulates consecutive rounds of tail batching and returns the results of each round.

    Args:
        run: parameters of tail batching. With ratios of 1, each round waits for every response.
        engine: speed and capacity of each of the ``replicas``.
        workload: source of response lengths and reward times.
        rounds: number of rounds.
        seed: seed of all random draws.
    """
    player = Player(run, Cluster(engine, replicas, workload.prompt_tokens), workload, seed)
    return [player.play() for _ in range(rounds)]


class Player:
    """Simulates rounds of tail batching: carries out the decisions of :class:`TailBatching` on the simulated ``cluster``."""

    def __init__(self, run: TailRun, cluster: Cluster, workload: Lengths, seed: int) -> None:
        self.cluster = cluster
        self._core = TailBatching(run)
        self._workload = workload
        self._rng = np.random.default_rng(seed)
        self._offered = 0
        self._rewards: dict[int, float] = {}  # reward seconds, by response id
        self._rewarding: list[tuple[float, int]] = []
        self._generated: dict[int, int] = {}  # number of tokens, by id of responses whose reward is being computed
        self._round = Round()

    def play(self) -> Round:
        """Simulates one round and returns its results."""
        core = self._core
        cluster = self.cluster
        rewarding = self._rewarding
        preempted = cluster.preemptions
        played = self._round = Round()
        began = cluster.now
        self._carry_out(core.begin_round(_ENDLESS_STEPS, cluster.now))
        while core.phase is not Phase.BETWEEN_ROUNDS:
            if rewarding and rewarding[0][0] <= cluster.next_event():
                now, response_id = heapq.heappop(rewarding)
                if self._generated.pop(response_id, 0):  # 0: cancelled
                    cluster.now = now
                    self._carry_out(core.response_scored(response_id, now))
            elif request := cluster.happen():
                played.ends.append(cluster.now - began)
                self._carry_out(core.response_generated(request.id, request.length))
                if self._rewards:
                    self._generated[request.id] = request.length
                    heapq.heappush(rewarding, (cluster.now + self._rewards[request.id], request.id))
                else:
                    self._carry_out(core.response_scored(request.id, cluster.now))
        played.preemptions = cluster.preemptions - preempted
        rewarding.clear()
        self._rewards.clear()
        return played

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        if not decisions:  # most often, and this is called for each event
            return
        launches: list[Launch] = []
        cancelled: list[int] = []
        trains = False
        for decision in decisions:
            match decision:
                case Launch():
                    launches.append(decision)
                case Cancel(_, response_ids):
                    cancelled += response_ids
                case RequestPrompts(count):
                    new = range(self._offered, self._offered + count)
                    self._offered = new.stop
                    self._carry_out(self._core.offer([str(number) for number in new], self.cluster.now))
                case TrainBatch():
                    trains = True
                case RoundEnded(metrics):
                    self._round.metrics = metrics
        if launches:
            self._launch(launches)
        if cancelled:
            running = [response_id for response_id in cancelled if response_id in self.cluster]
            if trains:
                self._round.unfinished += len(running)
            tokens = dict(zip(running, self.cluster.cancel(running), strict=True))
            tokens |= {i: self._generated.pop(i) for i in cancelled if i in self._generated}
            for response_id, had in tokens.items():
                self._carry_out(self._core.response_aborted(response_id, had))

    def _launch(self, launches: Sequence[Launch]) -> None:
        ids = [response_id for launch in launches for response_id in launch.response_ids]
        each = len(launches[0].response_ids)
        prompts = [int(launch.prompt_id) for launch in launches]
        lengths = self._workload.lengths(prompts, each, self._rng).ravel().tolist()
        seconds = self._workload.reward_seconds(len(ids), self._rng)
        if seconds is not None:
            self._rewards |= dict(zip(ids, seconds.tolist(), strict=True))
        self.cluster.launch(ids, lengths)
