"""Load balancing of rollouts: decides when each response starts and on which replica of the rollout engine.

A response waits in the router until a replica has a free slot (late binding). Responses that are expected to be long start first.
Running responses can be preempted, or migrate to another replica. Starting long responses first, migration, and generating a
response in several parts are from Seer (2025). The estimate of the future peak of a key-value cache is from the Past-Future
scheduler (ASPLOS'25).
"""

import hashlib
import math
from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rl_accel.features import BalanceFlags

HOME_MARGIN = 4
"""A response goes to its preferred replica (usually that of its last turn) unless this replica has over HOME_MARGIN requests more
than another. Chosen by hand."""
AHEAD_SECONDS = 0.5
"""The router sends a response to a full engine if one of its slots will probably be free within this many seconds. The response
waits in the engine. Otherwise, the slot would stay empty until the next response arrives. Chosen by hand."""
PROMPTS, PER_PROMPT, RECENT = 100_000, 32, 4096
"""Maximum number of response lengths kept to predict others: PER_PROMPT for each of PROMPTS prompts, and the last RECENT of all."""
PARTS, FEWEST = 512, 16
"""Maximum and minimum number of measurements to which the speed of the engines is fitted (see :class:`_Speed`)."""
PREEMPTED_SHARE = 1 / 16
"""Maximum share of the unfinished responses that are preempted (stopped until all others have started). Chosen by hand."""
READ_SHARE, READ_WEIGHT = 1 / 64, 1000
"""READ_SHARE: time to prefill a token, divided by the time to generate a token. A guess, which measurements correct.
READ_WEIGHT: weight of this guess, which counts like a measurement of this many prefilled tokens."""


def key_of(prompt: NDArray[np.int32]) -> int:
    """Returns a 64-bit hash of the tokens of a prompt, int32[T]. The hash is the same in all processes."""
    return int.from_bytes(hashlib.blake2b(prompt.tobytes(), digest_size=8).digest(), "little", signed=True)


class Instruction(NamedTuple):
    """Order to start the response named ``ticket`` on ``replica`` or, if ``stop`` is True, to stop it there for a while."""

    ticket: str
    replica: str
    stop: bool = False


@dataclass(slots=True, eq=False)
class _Replica:
    """A replica of the rollout engine. ``cache_tokens`` is the capacity of the key-value cache in tokens.

    ``area`` is the sum of the seconds that all responses have run on the replica, up to the time ``changed``. A difference of two
    areas, divided by the time between, is the mean number of running responses.
    """

    name: str
    cache_tokens: float
    changed: float
    area: float = 0.0
    running: "dict[str, _Response]" = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.running)

    def count(self, now: float) -> float:
        """Updates ``area``, the total seconds that responses have run on the replica, to the time ``now``, and returns it."""
        self.area += len(self.running) * (now - self.changed)
        self.changed = now
        return self.area


@dataclass(slots=True, eq=False)
class _Group:
    """The ``count`` unfinished responses to one prompt.

    ``lengths`` are the lengths of the prompt's finished responses in tokens. ``home`` is the name of the replica on which a
    response to the prompt started last. Groups with lower ``order`` start their waiting responses first.
    """

    prompt: str
    lengths: deque[int]
    waiting: "deque[_Response]" = field(default_factory=deque)
    running: "dict[str, _Response]" = field(default_factory=dict)
    count: int = 0
    home: str = ""
    order: tuple[float, ...] = ()


@dataclass(slots=True, eq=False)
class _Response:
    """An unfinished response. ``replica`` is None while it waits.

    ``tokens`` (generated) and ``seconds`` (on a replica) count only up to the last start on a replica.
    """

    ticket: str
    group: _Group
    prompt_tokens: int
    movable: bool
    arrived: float
    target: str  # preferred replica
    tokens: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    since: float = 0.0  # time when the response began to wait or was bound to its replica
    replica: _Replica | None = None
    area: float = 0.0  # area of the replica when the response was bound
    expected: float = 0.0
    predicted: float = 0.0  # expected length at the first binding; 0: unknown
    moves: int = 0
    stopping: bool = False


class _Speed:
    """Speed model of the replicas, fitted to measurements. Each measurement is one uninterrupted run of a response on a replica.

    The model of the seconds of a run is ``start + tokens * (token + request * running) + again * read``.

    - Measured for each run: generated tokens (``tokens``), mean number of requests on the replica (``running``), and tokens that
      were prefilled again because the response had been stopped (``again``).
    - Fitted: seconds of any run (``start``), for a generated token (``token``), for a generated token and another running request
      (``request``), and for a token prefilled again (``read``).
    """

    def __init__(self) -> None:
        self._parts: deque[tuple[float, ...]] = deque(maxlen=PARTS)
        self._new = 0
        self.token = self.request = self.start = self.read = 0.0
        self.part = 0.0  # mean seconds of a run

    def add(self, tokens: int, running: float, again: float, seconds: float) -> None:
        self._parts.append((tokens, tokens * running, 1.0, again, seconds))
        self._new += 1

    def fit(self) -> None:
        """Fits the speed model by least squares, if there are enough measurements and at least an eighth is new."""
        if len(self._parts) >= FEWEST and self._new * 8 >= len(self._parts):
            self._new = 0
            prior = (-READ_SHARE * READ_WEIGHT, 0.0, 0.0, READ_WEIGHT, 0.0)
            parts = np.array([*self._parts, prior])
            solution = np.linalg.lstsq(parts[:, :4], parts[:, 4], rcond=None)[0]
            self.token, self.request, self.start, self.read = np.maximum(solution, 0.0).tolist()
            self.part = float(parts[:-1, 4].mean())

    def of(self, running: float) -> float:
        """Returns the seconds per generated token with ``running`` requests on a replica; 0 before the first fit."""
        return self.token + self.request * running


class Balance:
    """State machine that decides where and when responses are generated. It has no I/O and no clock.

    **Start.** A response waits until a replica has a free slot. A slot is free if fewer responses run on the replica than ``slots``
    plus the number of responses that are expected to end within :data:`AHEAD_SECONDS`. If the size of the replica's key-value cache
    is known, the cache must also have room for the expected peak of all responses on the replica.

    **Order.** Responses that have begun come first (next turns, migrated responses, responses whose replica died). One response of
    each prompt follows, then the responses with the highest expected length. For a response that has n tokens so far, the expected
    length is the mean of these lengths:

    - the lengths above n of the prompt's complete responses, in this epoch and earlier epochs;
    - the mean of all recent lengths above n, over all prompts;
    - for each running response of the prompt that has m > n tokens so far, the mean of all recent lengths above m.

    **Preemption.** While some responses have not started, the longest running responses are stopped to make room for them. The
    stopped responses continue after all others have started. They are at most as many as all slots, and at most the share
    :data:`PREEMPTED_SHARE` of the unfinished responses.

    **Replica.** A response goes to its preferred replica or, if this is much fuller than another (:data:`HOME_MARGIN`), to the
    replica with the fewest requests. The next turn of a conversation prefers the replica of the last turn, a migrating response
    the target of the migration.

    **Migration.** When no response waits, the response with the most expected tokens left migrates from the fullest replica to the
    emptiest, if the expected saving of time is at least ``flags.margin`` times the time that the migration costs. Preemptions and
    migrations together stop a response at most ``flags.max_moves`` times.

    **Router.** The router, which drives this class, calls ``request`` for each new response, ``over`` when a response has ended,
    ``again`` when a response was stopped or its replica died, and ``tick`` a few times a second. It carries out the instructions
    that each call returns. The argument ``now`` is the time in seconds of one clock. Events about finished responses are ignored.
    Impossible events raise ValueError and change nothing.

    Args:
        slots: number of slots of a replica, the maximum number of requests that it runs at once.
        flags: the user's flags.
        ordered: whether the longest expected responses start first; if False, responses start in the order of arrival.
        together: whether a response without a preferred replica prefers the replica on which its prompt's last response started.

    Attributes:
        lengths: lengths of complete responses in tokens, by prompt. A later run can take them over by :meth:`learn`.
        waiting: number of responses that wait for a slot.
    """

    def __init__(self, slots: int, flags: BalanceFlags, ordered: bool = True, together: bool = False) -> None:
        if slots < 1:
            raise ValueError(f"slots must be at least 1, found {slots}")
        self.slots, self.flags, self.ordered, self.together = slots, flags, ordered, together
        self._speed, self._numbers = _Speed(), _Numbers()
        self.lengths: dict[str, deque[int]] = {}
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._new = 0  # number of recent lengths added since the last sort
        self._ascending: list[int] = []
        self._sums: list[int] = []  # suffix sums of ``_ascending``
        self._replicas: dict[str, _Replica] = {}
        self._responses: dict[str, _Response] = {}
        self._groups: dict[str, _Group] = {}
        self._begun: dict[str, _Response] = {}  # waiting, ahead of ``_queue``
        self._preempted: dict[str, _Response] = {}  # waiting, behind ``_queue``
        self._queue: dict[str, _Group] = {}
        self.waiting = 0

    def __len__(self) -> int:
        return len(self._responses)

    def learn(self, lengths: Mapping[str, Sequence[int]]) -> None:
        """Takes over response lengths from an earlier run, in tokens, by prompt."""
        for prompt, observed in lengths.items():
            self.lengths[prompt] = deque(observed, PER_PROMPT)
            self._recent += observed
            self._new += len(observed)

    def running(self) -> dict[str, int]:
        """Returns the number of unfinished responses on each replica, by replica name."""
        return {name: len(replica) for name, replica in self._replicas.items()}

    def add_replica(self, name: str, now: float, cache_tokens: float = math.inf) -> list[Instruction]:
        """Adds a replica, or changes the capacity of its key-value cache. Returns instructions for the router."""
        self._replicas.setdefault(name, _Replica(name, cache_tokens, now)).cache_tokens = cache_tokens
        return self._fill(now)

    def remove_replica(self, name: str) -> None:
        """Removes a replica. The router must then call ``over`` for each response on it or, if the replica crashed, ``again``."""
        self._replicas.pop(name, None)

    def request(
        self, ticket: str, now: float, prompt: str = "", prompt_tokens: int = 0, home: str = "", movable: bool = True
    ) -> list[Instruction]:
        """Adds a response to generate. Returns the instructions that the router must carry out now.

        Args:
            ticket: unique name of the response.
            prompt: name of the prompt, the same for all responses to the prompt in every epoch.
            home: name of the replica that generated the last turn of the conversation; empty for a first turn.
            movable: whether the response can be stopped and continued on another replica.
        """
        if ticket in self._responses:
            raise ValueError(f"ticket must be new, found {ticket!r} twice")
        group = self._groups.get(prompt)
        if group is None:
            lengths = self.lengths.pop(prompt, None) or deque(maxlen=PER_PROMPT)
            self.lengths[prompt] = lengths
            if len(self.lengths) > PROMPTS:
                del self.lengths[next(iter(self.lengths))]
            group = self._groups[prompt] = _Group(prompt, lengths)
        group.count += 1
        response = _Response(ticket, group, prompt_tokens, movable, now, home)
        self._responses[ticket] = response
        self._wait(response, now, self._begun if home else None)
        return self._fill(now)

    def over(self, ticket: str, now: float, tokens: int | None = None) -> list[Instruction]:
        """Removes a response that is complete or no longer wanted. Returns the instructions that the router must carry out now.

        ``tokens`` is the number of tokens that a complete response has generated since its last start; None: no longer wanted.
        """
        response = self._responses.get(ticket)
        if response is None:
            return []
        if tokens is not None:
            self._end_part(response, tokens, now)
            self._recent.append(response.tokens)
            self._new += 1
            response.group.lengths.append(response.tokens)
            self._numbers.done.append((response, now))
        elif response.replica is not None:
            self._unbind(response, now)
        else:
            self._leave_queue(response)
        del self._responses[ticket]
        group = response.group
        group.count -= 1
        if not group.count:
            del self._groups[group.prompt]
        elif group.waiting:
            self._set_order(group, now)
        return self._fill(now)

    def again(self, ticket: str, now: float, tokens: int | None = None) -> list[Instruction] | None:
        """Queues a response again that was stopped or whose replica died. Returns the instructions that the router must carry out.

        ``tokens`` is the number of tokens that a stopped response has generated since its last start; None: the replica died. If
        the response has ended, or was stopped without an instruction, the method does nothing and returns None.
        """
        response = self._responses.get(ticket)
        if response is None or (tokens is not None and not response.stopping):
            return None
        if tokens is None:
            self._unbind(response, now)
        else:
            self._end_part(response, tokens, now)
            response.moves += 1
            response.expected = self._expect(response.group, response.tokens, now)
            self._numbers.moves += 1
        self._wait(response, now, self._begun if tokens is None or response.target else self._preempted)
        return self._fill(now)

    def tick(self, now: float) -> list[Instruction]:
        """Updates the speed model and the expected lengths. Returns instructions to start or to stop responses."""
        self._speed.fit()
        for replica in self._replicas.values():
            for response in replica.running.values() if replica.cache_tokens < math.inf else ():
                response.expected = self._expect(response.group, self._tokens(response, now), now)
        for group in self._queue.values():
            self._set_order(group, now)
        return self._fill(now) + self._stop_long(now) or self._migrate(now)

    def take_numbers(self) -> dict[str, float]:
        """Returns the metrics of load balancing since the last call, by name; {} if no response was completed since."""
        numbers, self._numbers = self._numbers, _Numbers()
        return numbers.summary([*self._replicas], self.slots)

    # Implementation

    def _wait(self, response: _Response, now: float, queue: "dict[str, _Response] | None") -> None:
        self.waiting += 1
        response.since = now
        if queue is not None:
            queue[response.ticket] = response
        else:
            group = response.group
            group.waiting.append(response)
            self._queue[group.prompt] = group
            self._set_order(group, now)

    def _leave_queue(self, response: _Response) -> None:
        self.waiting -= 1
        if (self._begun.pop(response.ticket, None) or self._preempted.pop(response.ticket, None)) is None:
            group = response.group
            group.waiting.remove(response)
            if not group.waiting:
                del self._queue[group.prompt]

    def _set_order(self, group: _Group, now: float) -> None:
        group.order = (bool(group.home), -self._expect(group, 0, now)) if self.ordered else ()

    def _expect(self, group: _Group, tokens: float, now: float) -> float:
        """Returns the expected final length in tokens of a response of ``group`` that has ``tokens`` tokens so far."""
        samples = [float(length) for length in group.lengths if length > tokens]
        if self._speed.of(1):
            others = (self._tokens(response, now) for response in group.running.values())
            samples += [self._mean_length_above(other) for other in others if other > tokens]
        return (sum(samples) + self._mean_length_above(tokens)) / (len(samples) + 1)

    def _mean_length_above(self, tokens: float) -> float:
        """Returns the mean length of the recent responses longer than ``tokens``; if there are none, ``2 * tokens``, a guess."""
        if self._new > len(self._ascending) // 16:
            self._ascending, self._new = sorted(self._recent), 0
            self._sums = [*accumulate(reversed(self._ascending))][::-1]
        at = bisect_right(self._ascending, tokens)
        return self._sums[at] / (len(self._ascending) - at) if at < len(self._ascending) else 2 * tokens

    def _tokens(self, response: _Response, now: float) -> float:
        """Returns the estimated number of tokens of a response at the time ``now``."""
        replica, seconds = response.replica, now - response.since
        if replica is None or not self._speed.of(1) or seconds <= 0:
            return response.tokens
        running = max((replica.count(now) - response.area) / seconds, 1.0)
        return response.tokens + max(seconds - self._speed.start, 0.0) / self._speed.of(running)

    def _fill(self, now: float) -> list[Instruction]:
        """Assigns waiting responses to replicas with free slots. Returns the instructions to start these responses."""
        instructions: list[Instruction] = []
        while self.waiting:
            if self._begun:
                response = next(iter(self._begun.values()))
            elif self._queue:
                response = min(self._queue.values(), key=lambda group: group.order).waiting[0]
            else:
                response = max(self._preempted.values(), key=lambda preempted: preempted.expected)
            replica = self._replica_for(response, now)
            if replica is None:
                break
            self._leave_queue(response)
            self._bind(response, replica, now)
            instructions.append(Instruction(response.ticket, replica.name))
        return instructions

    def _replica_for(self, response: _Response, now: float) -> _Replica | None:
        part, slots = self._speed.part, self.slots
        limit = slots + (min(math.ceil(slots * AHEAD_SECONDS / part), slots) if part else 1)
        free = [replica for replica in self._replicas.values() if len(replica) < limit]
        free.sort(key=len)
        home = self._replicas.get(response.target or (response.group.home if self.together else ""))
        if home is not None and home in free and len(home) <= len(free[0]) + HOME_MARGIN:
            free.insert(0, home)
        return next((replica for replica in free if self._fits(response, replica, now)), None)

    def _fits(self, response: _Response, replica: _Replica, now: float) -> bool:
        """Returns True if ``response`` and the running responses are expected to fit into the key-value cache until they end."""
        if replica.cache_tokens == math.inf or not replica.running:
            return True
        response.expected = self._expect(response.group, response.tokens, now)
        tokens_done = [(each, self._tokens(each, now)) for each in (response, *replica.running.values())]
        tokens_done.sort(key=lambda pair: pair[1] - pair[0].expected)  # when one ends, all listed before it still run
        cached = np.cumsum([each.prompt_tokens + tokens for each, tokens in tokens_done])
        tokens_left = [max(each.expected - tokens, 1.0) for each, tokens in tokens_done]
        return bool((cached + np.arange(1, len(cached) + 1) * tokens_left).max() <= replica.cache_tokens)

    def _bind(self, response: _Response, replica: _Replica, now: float) -> None:
        group = response.group
        response.expected = self._expect(group, response.tokens, now)
        response.predicted = response.predicted or response.expected
        response.waited += now - response.since
        response.replica, response.since, response.area = replica, now, replica.count(now)
        response.target = ""
        replica.running[response.ticket] = group.running[response.ticket] = response
        group.home = replica.name
        if group.waiting:
            self._set_order(group, now)

    def _unbind(self, response: _Response, now: float) -> None:
        replica = response.replica
        if replica is None:
            raise ValueError(f"ticket must be of a response that runs, but {response.ticket!r} waits")
        replica.count(now)
        del replica.running[response.ticket], response.group.running[response.ticket]
        response.replica, response.stopping = None, False

    def _end_part(self, response: _Response, tokens: int, now: float) -> None:
        replica, seconds = response.replica, now - response.since
        if replica is not None and tokens > 0 and seconds > 0:
            again = response.prompt_tokens + response.tokens if response.moves else 0
            self._speed.add(tokens, (replica.count(now) - response.area) / seconds, again, seconds)
            self._numbers.move_seconds += (self._speed.start + again * self._speed.read) * bool(response.moves)
            self._numbers.used[replica.name] += seconds
        self._unbind(response, now)
        response.tokens += tokens
        response.seconds += seconds

    def _stop_long(self, now: float) -> list[Instruction]:
        """Returns instructions to preempt long responses; [] if too few lengths of complete responses are known."""
        if not (self._queue and self.ordered and self.flags.max_moves and self._speed.of(1)):
            return []
        under_way = len(self._responses) - len(self._begun) - len(self._preempted)
        stopping = sum(response.stopping for response in self._responses.values())
        room = self.slots * len(self._replicas) - len(self._preempted) - stopping
        if room < 1 or len(self._recent) < min(under_way, RECENT):
            return []
        self._mean_length_above(0)
        threshold = self._ascending[int(len(self._ascending) * (1 - min(room / under_way, PREEMPTED_SHARE)))]
        long = [
            (response, replica)
            for replica in self._replicas.values()
            for response, tokens in self._stoppable(replica, now).items()
            if tokens > threshold
        ]
        return [_stop(response, replica) for response, replica in long[:room]]

    def _migrate(self, now: float) -> list[Instruction]:
        """Returns the instruction to stop the response that should migrate next; [] if none should migrate now."""
        speed, flags, replicas = self._speed, self.flags, self._replicas.values()
        if self.waiting or not replicas or not (speed.of(1) or flags.margin == 0):
            return []
        if any(response.stopping for response in self._responses.values()):
            return []
        target, fullest = min(replicas, key=len), max(replicas, key=len)
        if len(target) >= self.slots or len(fullest) < len(target) + 2:
            return []
        running = self._stoppable(fullest, now)
        tokens_left = {each: self._expect(each.group, tokens, now) - tokens for each, tokens in running.items()}
        response = max(tokens_left, key=tokens_left.__getitem__, default=None)
        if response is None:
            return []
        gain = tokens_left[response] * (speed.of(len(fullest)) - speed.of(len(target) + 1))
        price = speed.start + speed.read * (response.prompt_tokens + running[response])
        if gain < flags.margin * price:
            return []
        response.target = target.name
        return [_stop(response, fullest)]

    def _stoppable(self, replica: _Replica, now: float) -> dict[_Response, float]:
        """Returns the responses on ``replica`` that may be stopped, each with its estimated number of tokens so far.

        A response may be stopped if it is movable, is not being stopped, and has been stopped fewer than ``flags.max_moves`` times.
        """
        most = self.flags.max_moves
        return {
            response: self._tokens(response, now)
            for response in replica.running.values()
            if response.movable and not response.stopping and response.moves < most
        }


def _stop(response: _Response, replica: _Replica) -> Instruction:
    response.stopping = True
    return Instruction(response.ticket, replica.name, stop=True)


@dataclass(slots=True)
class _Numbers:
    """Numbers since the last report of metrics.

    Attributes:
        moves: number of times that a running response was stopped for a preemption or a migration.
        move_seconds: estimated seconds that the restarts of stopped responses took.
        used: seconds that responses ran on each replica, summed over its slots.
        done: complete responses, each with the time of its end.
    """

    moves: int = 0
    move_seconds: float = 0.0
    used: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    done: list[tuple[_Response, float]] = field(default_factory=list)

    def summary(self, replicas: Sequence[str], slots: int) -> dict[str, float]:
        """Returns the metrics of load balancing by name; {} without a complete response."""
        busy = until = 0.0
        for arrived, ended in sorted((response.arrived, ended) for response, ended in self.done):
            busy += max(ended - max(arrived, until), 0.0)
            until = max(until, ended)
        if not busy:
            return {}
        used = [min(self.used[name] / (slots * busy), 1.0) for name in {*replicas, *self.used}]
        waits = [response.waited for response, _ in self.done]
        arrivals = sorted((response.arrived, response.seconds) for response, _ in self.done)
        numbers = {
            "slots_in_use": float(np.mean(used)),
            "slots_in_use_lowest": min(used),
            "slots_in_use_highest": max(used),
            "queue_length": sum(waits) / busy,
            "queue_wait_seconds": float(np.mean(waits)),
            "queue_wait_p90_seconds": float(np.quantile(waits, 0.9)),
            "moves": self.moves,
            "move_seconds": self.move_seconds,
            "seconds_saved": end_bound_at_arrival(arrivals, len(used), slots) - until,
        }
        if errors := [abs(r.predicted / r.tokens - 1) for r, _ in self.done if r.predicted and r.tokens]:
            numbers["length_error_p50"], numbers["length_error_p90"] = np.quantile(errors, [0.5, 0.9]).tolist()
        return numbers


def end_bound_at_arrival(responses: Sequence[tuple[float, float]], replicas: int, slots: int) -> float:
    """Returns the time at which the last response would have ended without load balancing.

    Each response then goes to the replica with the fewest requests as soon as it arrives, and waits there for a slot.

    Args:
        responses: arrival time and duration of each response in seconds, in the order of arrival.
        replicas: number of replicas.
        slots: number of slots of each replica.
    """
    ends: list[list[float]] = [[] for _ in range(replicas)]
    for arrived, seconds in responses:
        fewest = min(ends, key=lambda of_replica: len(of_replica) - bisect_right(of_replica, arrived))
        begins = arrived if len(fewest) < slots else max(arrived, fewest[-slots])
        insort(fewest, begins + seconds)
    return max(of_replica[-1] for of_replica in ends if of_replica)
