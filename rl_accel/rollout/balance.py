"""Balanced rollouts: late binding of responses to replicas, the longest responses first, with preemption and migration.

Migration, longest first and rollouts in parts are from Seer (2025); the future peak of a cache is from the Past-Future scheduler
(ASPLOS'25).
"""

import math
from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from rl_accel.features import BalanceFlags

HOME_MARGIN = 4
"""Maximum number of requests that a conversation's replica may have above the emptiest replica and still get the next turn."""
AHEAD_SECONDS = 0.5
"""Maximum seconds of work queued inside an engine, to hide the router's round trip."""
PROMPTS, PER_PROMPT, RECENT = 100_000, 32, 4096
"""Maximum numbers of prompts with stored lengths, of lengths per prompt, and of recent lengths over all prompts."""
PARTS, FEWEST = 512, 16
"""Number of response parts kept to fit the engines' speed, and minimum number for a fit."""
PUT_OFF = 1 / 16
"""Maximum share of responses that are preempted."""
READ_SHARE, READ_WEIGHT = 1 / 64, 1000
"""Prior for the seconds to prefill a token again, as a share of the seconds to generate a token, and its weight in tokens."""


class Decision(NamedTuple):
    """Order to start the response ``ticket`` on ``replica`` or, with ``stop``, to stop the response, which continues elsewhere."""

    ticket: str
    replica: str
    stop: bool = False


@dataclass(slots=True, eq=False)
class _Replica:
    """A rollout server. ``area`` is the integral of the number of running responses over time, until ``changed``."""

    name: str
    cache_tokens: float
    changed: float
    area: float = 0.0
    running: "dict[str, _Response]" = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.running)

    def count(self, now: float) -> float:
        """Advances ``area`` to ``now`` and returns ``area``."""
        self.area += len(self.running) * (now - self.changed)
        self.changed = now
        return self.area


@dataclass(slots=True, eq=False)
class _Group:
    """The ``count`` unfinished responses of one prompt; ``lengths`` of finished responses. The least ``order`` is served first."""

    prompt: str
    lengths: deque[int]
    waiting: "deque[_Response]" = field(default_factory=deque)
    running: "dict[str, _Response]" = field(default_factory=dict)
    count: int = 0
    home: str = ""
    order: tuple[float, ...] = ()


@dataclass(slots=True, eq=False)
class _Response:
    """An unfinished response; waiting if ``replica`` is None. ``tokens`` and ``seconds`` are sums over its earlier parts."""

    ticket: str
    group: _Group
    prompt_tokens: int
    movable: bool
    arrived: float
    target: str  # preferred replica
    tokens: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    since: float = 0.0  # time when the response began to wait or was bound
    replica: _Replica | None = None
    area: float = 0.0  # area of the replica when the response was bound
    expected: float = 0.0
    predicted: float = 0.0  # expected length at the first binding; 0: unknown
    moves: int = 0
    stopping: bool = False


class _Speed:
    """Seconds that replicas need, fitted to parts of responses: ``start + tokens * (token + request * running) + again * read``.

    ``running`` is the mean number of running requests, ``again`` the number of tokens prefilled again after a stop.
    """

    def __init__(self) -> None:
        self._parts: deque[tuple[float, ...]] = deque(maxlen=PARTS)
        self._new = 0
        self.token = self.request = self.start = self.read = 0.0
        self.part = 0.0  # mean duration of a part in seconds

    def add(self, tokens: int, running: float, again: float, seconds: float) -> None:
        self._parts.append((tokens, tokens * running, 1.0, again, seconds))
        self._new += 1

    def fit(self) -> None:
        """Updates the coefficients by least squares, if enough new parts have come."""
        if len(self._parts) >= FEWEST and self._new * 8 >= len(self._parts):
            self._new = 0
            prior = (-READ_SHARE * READ_WEIGHT, 0.0, 0.0, READ_WEIGHT, 0.0)
            parts = np.array([*self._parts, prior])
            found = np.linalg.lstsq(parts[:, :4], parts[:, 4], rcond=None)[0]
            self.token, self.request, self.start, self.read = np.maximum(found, 0.0).tolist()
            self.part = float(parts[:-1, 4].mean())

    def of(self, running: float) -> float:
        """Returns the seconds per token with ``running`` requests; 0 if too few parts were seen."""
        return self.token + self.request * running


class Balance:
    """Decides where and when responses are generated. No I/O and no clock: events in, decisions out.

    A response waits until a replica has a free slot: fewer running responses than ``places`` plus the number that end within
    :data:`AHEAD_SECONDS`. A key-value cache of known size must also have room for the expected peak of all its responses.

    The queue starts with responses that have begun (next turns, migrated responses, responses whose replica died). One response of
    each prompt follows, then the responses with the highest expected length. The expected length is the mean of

    - lengths of the prompt's complete responses, of this epoch and earlier ones, that are longer than this response is now,
    - for this response and each running response of the prompt with more tokens: the mean length of longer recent responses.

    Long responses cannot be told in time, and a long response that starts last delays the step. While some responses have not
    started, running responses that are long are therefore preempted: stopped until all others have started. They then run side by
    side. Their number is limited by the slots and by the share :data:`PUT_OFF`. The length from which responses are preempted is
    the quantile of recent lengths that fits this number.

    A response goes to the replica with the fewest requests. A response that has begun goes to its own replica, unless that replica
    has more than :data:`HOME_MARGIN` requests above the fewest. When no response waits, the response with the most expected tokens
    left migrates from the fullest replica to the emptiest, if that should save ``flags.margin`` times its cost. A response is
    stopped at most ``flags.max_moves`` times.

    The driver calls ``request`` for a response, carries out the decisions that each call returns, and reports ``over``, or
    ``again`` after a stop or the death of a replica. It calls ``tick`` a few times a second. ``now`` is in seconds of one clock.
    Events about finished responses are ignored; impossible events raise ValueError and change nothing.

    Args:
        places: slots of a replica: maximum number of running requests.
        flags: the user's flags.
        ordered: whether expected length decides the order; False: order of arrival.
        together: whether the responses of a prompt go to the same replica.

    Attributes:
        lengths: lengths of complete responses in tokens, by prompt. A later run can :meth:`learn` them.
    """

    def __init__(self, places: int, flags: BalanceFlags, ordered: bool = True, together: bool = False) -> None:
        if places < 1:
            raise ValueError(f"places must be at least 1, found {places}")
        self.places, self.flags, self.ordered, self.together = places, flags, ordered, together
        self._speed, self._numbers = _Speed(), _Numbers()
        self.lengths: dict[str, deque[int]] = {}
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._new = 0  # recent lengths since the last sort
        self._ascending: list[int] = []
        self._sums: list[int] = []  # suffix sums of ``_ascending``
        self._replicas: dict[str, _Replica] = {}
        self._responses: dict[str, _Response] = {}
        self._groups: dict[str, _Group] = {}
        self._begun: dict[str, _Response] = {}  # waiting, ahead of ``_queue``
        self._put_off: dict[str, _Response] = {}  # waiting, behind ``_queue``
        self._queue: dict[str, _Group] = {}
        self.waiting = 0

    def __len__(self) -> int:
        return len(self._responses)

    def learn(self, lengths: Mapping[str, Sequence[int]]) -> None:
        """Adds the ``lengths`` of an earlier run."""
        for prompt, its in lengths.items():
            self.lengths[prompt] = deque(its, PER_PROMPT)
            self._recent += its
            self._new += len(its)

    def running(self) -> dict[str, int]:
        """Return the number of responses on each replica."""
        return {name: len(replica) for name, replica in self._replicas.items()}

    def add_replica(self, name: str, now: float, cache_tokens: float = math.inf) -> list[Decision]:
        """Adds a replica, or updates ``cache_tokens`` of a known replica: the capacity of its key-value cache in tokens."""
        self._replicas.setdefault(name, _Replica(name, cache_tokens, now)).cache_tokens = cache_tokens
        return self._fill(now)

    def remove_replica(self, name: str) -> None:
        """Removes a replica. Its running responses end with ``over``, or with ``again`` if the replica is dead."""
        self._replicas.pop(name, None)

    def request(
        self, ticket: str, now: float, prompt: str = "", prompt_tokens: int = 0, home: str = "", movable: bool = True
    ) -> list[Decision]:
        """Adds a response to generate, with the unique name ``ticket``.

        ``prompt`` is the same for all responses of a prompt, in every epoch. ``home`` is the replica of the last turn, if any. Only
        a ``movable`` response can continue elsewhere after a stop.
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

    def over(self, ticket: str, now: float, tokens: int | None = None) -> list[Decision]:
        """Ends a response: complete with ``tokens`` more tokens, or no longer wanted if ``tokens`` is None."""
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

    def again(self, ticket: str, now: float, tokens: int | None = None) -> list[Decision] | None:
        """Queues a response again: it was stopped after ``tokens`` more tokens or, if None, its replica died.

        Returns None and changes nothing if the response is over or no stop was decided.
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
        self._wait(response, now, self._begun if tokens is None or response.target else self._put_off)
        return self._fill(now)

    def tick(self, now: float) -> list[Decision]:
        """Updates speed and expected lengths; decides on starts, preemptions and migrations."""
        self._speed.fit()
        for replica in self._replicas.values():
            for response in replica.running.values() if replica.cache_tokens < math.inf else ():
                response.expected = self._expect(response.group, self._tokens(response, now), now)
        for group in self._queue.values():
            self._set_order(group, now)
        return self._fill(now) + self._stop_long(now) or self._move(now)

    def take_numbers(self) -> dict[str, float]:
        """Returns the metrics since the last call, by name; {} if no response was completed."""
        numbers, self._numbers = self._numbers, _Numbers()
        return numbers.summary([*self._replicas], self.places)

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
        if (self._begun.pop(response.ticket, None) or self._put_off.pop(response.ticket, None)) is None:
            group = response.group
            group.waiting.remove(response)
            if not group.waiting:
                del self._queue[group.prompt]

    def _set_order(self, group: _Group, now: float) -> None:
        group.order = (bool(group.home), -self._expect(group, 0, now)) if self.ordered else ()

    def _expect(self, group: _Group, tokens: float, now: float) -> float:
        """Returns the expected length in tokens of a response of ``group`` that has ``tokens`` so far."""
        samples = [float(length) for length in group.lengths if length > tokens]
        if self._speed.of(1):
            far = (self._tokens(other, now) for other in group.running.values())
            samples += [self._beyond(other) for other in far if other > tokens]
        return (sum(samples) + self._beyond(tokens)) / (len(samples) + 1)

    def _beyond(self, tokens: float) -> float:
        """Returns the mean length of recent responses longer than ``tokens``; twice ``tokens`` if there are none."""
        if self._new > len(self._ascending) // 16:
            self._ascending, self._new = sorted(self._recent), 0
            self._sums = [*accumulate(reversed(self._ascending))][::-1]
        at = bisect_right(self._ascending, tokens)
        return self._sums[at] / (len(self._ascending) - at) if at < len(self._ascending) else 2 * tokens

    def _tokens(self, response: _Response, now: float) -> float:
        """Returns the estimated number of tokens of a response at ``now``."""
        replica, seconds = response.replica, now - response.since
        if replica is None or not self._speed.of(1) or seconds <= 0:
            return response.tokens
        running = max((replica.count(now) - response.area) / seconds, 1.0)
        return response.tokens + max(seconds - self._speed.start, 0.0) / self._speed.of(running)

    def _fill(self, now: float) -> list[Decision]:
        """Binds waiting responses while there are free slots."""
        decisions: list[Decision] = []
        while self.waiting:
            if self._begun:
                response = next(iter(self._begun.values()))
            elif self._queue:
                response = min(self._queue.values(), key=lambda group: group.order).waiting[0]
            else:
                response = max(self._put_off.values(), key=lambda one: one.expected)
            replica = self._place_for(response, now)
            if replica is None:
                break
            self._leave_queue(response)
            self._bind(response, replica, now)
            decisions.append(Decision(response.ticket, replica.name))
        return decisions

    def _place_for(self, response: _Response, now: float) -> _Replica | None:
        part, places = self._speed.part, self.places
        limit = places + (min(math.ceil(places * AHEAD_SECONDS / part), places) if part else 1)
        free = [replica for replica in self._replicas.values() if len(replica) < limit]
        free.sort(key=len)
        home = self._replicas.get(response.target or (response.group.home if self.together else ""))
        if home is not None and home in free and len(home) <= len(free[0]) + HOME_MARGIN:
            free.insert(0, home)
        return next((replica for replica in free if self._fits(response, replica, now)), None)

    def _fits(self, response: _Response, replica: _Replica, now: float) -> bool:
        """Returns whether the cache should hold ``response`` and all running responses until they end, at one token per step."""
        if replica.cache_tokens == math.inf or not replica.running:
            return True
        response.expected = self._expect(response.group, response.tokens, now)
        far = [(one, self._tokens(one, now)) for one in (response, *replica.running.values())]
        far.sort(key=lambda pair: pair[1] - pair[0].expected)  # when one ends, all before that one still run
        held = np.cumsum([one.prompt_tokens + tokens for one, tokens in far])
        left = [max(one.expected - tokens, 1.0) for one, tokens in far]
        return bool((held + np.arange(1, len(far) + 1) * left).max() <= replica.cache_tokens)

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
            self._numbers.moves_s += (self._speed.start + again * self._speed.read) * bool(response.moves)
            self._numbers.used[replica.name] += seconds
        self._unbind(response, now)
        response.tokens += tokens
        response.seconds += seconds

    def _stop_long(self, now: float) -> list[Decision]:
        """Stops responses to preempt, see above. Needs as many complete responses as are running or have not started."""
        if not (self._queue and self.ordered and self.flags.max_moves and self._speed.of(1)):
            return []
        under_way = len(self._responses) - len(self._begun) - len(self._put_off)
        stopping = sum(response.stopping for response in self._responses.values())
        room = self.places * len(self._replicas) - len(self._put_off) - stopping
        if room < 1 or len(self._recent) < min(under_way, RECENT):
            return []
        self._beyond(0)
        far = self._ascending[int(len(self._ascending) * (1 - min(room / under_way, PUT_OFF)))]
        by_replica = [(replica, self._stoppable(replica, now)) for replica in self._replicas.values()]
        long = [(one, replica) for replica, its in by_replica for one, tokens in its.items() if tokens > far]
        return [_stop(response, replica) for response, replica in long[:room]]

    def _move(self, now: float) -> list[Decision]:
        """Stops a response that should migrate, if no response waits; one migration at a time."""
        speed, flags, replicas = self._speed, self.flags, self._replicas.values()
        if self.waiting or not replicas or not (speed.of(1) or flags.margin == 0):
            return []
        if any(response.stopping for response in self._responses.values()):
            return []
        target, fullest = min(replicas, key=len), max(replicas, key=len)
        if len(target) >= self.places or len(fullest) < len(target) + 2:
            return []
        running = self._stoppable(fullest, now)
        left = {one: self._expect(one.group, tokens, now) - tokens for one, tokens in running.items()}
        response = max(left, key=left.__getitem__, default=None)
        if response is None:
            return []
        gain = left[response] * (speed.of(len(fullest)) - speed.of(len(target) + 1))
        price = speed.start + speed.read * (response.prompt_tokens + running[response])
        if gain < flags.margin * price:
            return []
        response.target = target.name
        return [_stop(response, fullest)]

    def _stoppable(self, replica: _Replica, now: float) -> dict[_Response, float]:
        """Returns the responses on ``replica`` that may be stopped, with the estimated number of tokens of each."""
        most = self.flags.max_moves
        running = [one for one in replica.running.values() if one.movable and not one.stopping and one.moves < most]
        return {one: self._tokens(one, now) for one in running}


def _stop(response: _Response, replica: _Replica) -> Decision:
    response.stopping = True
    return Decision(response.ticket, replica.name, stop=True)


@dataclass(slots=True)
class _Numbers:
    moves: int = 0
    moves_s: float = 0.0
    used: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # busy slot-seconds by replica
    done: list[tuple[_Response, float]] = field(default_factory=list)

    def summary(self, replicas: Sequence[str], places: int) -> dict[str, float]:
        busy = until = 0.0
        for arrived, ended in sorted((response.arrived, ended) for response, ended in self.done):
            busy += max(ended - max(arrived, until), 0.0)
            until = max(until, ended)
        if not busy:
            return {}
        used = [min(self.used[name] / (places * busy), 1.0) for name in {*replicas, *self.used}]
        waits = [response.waited for response, _ in self.done]
        errors = [abs(r.predicted / r.tokens - 1) for r, _ in self.done if r.predicted and r.tokens]
        arrivals = sorted((response.arrived, response.seconds) for response, _ in self.done)
        numbers = {
            "places_in_use": float(np.mean(used)),
            "places_in_use_lowest": min(used),
            "places_in_use_highest": max(used),
            "queue_length": sum(waits) / busy,
            "queue_wait_s": float(np.mean(waits)),
            "queue_wait_p90_s": float(np.quantile(waits, 0.9)),
            "moves": self.moves,
            "moves_s": self.moves_s,
            "seconds_saved": end_bound_at_arrival(arrivals, len(used), places) - until,
        }
        if errors:
            numbers["length_error_p50"], numbers["length_error_p90"] = np.quantile(errors, [0.5, 0.9]).tolist()
        return numbers


def end_bound_at_arrival(responses: Sequence[tuple[float, float]], replicas: int, places: int) -> float:
    """Returns the end time of the last of ``responses`` (arrival, seconds) if each was bound on arrival, as verl does."""
    ends: list[list[float]] = [[] for _ in range(replicas)]
    for arrived, seconds in responses:
        fewest = min(ends, key=lambda its: len(its) - bisect_right(its, arrived))
        begins = arrived if len(fewest) < places else max(arrived, fewest[-places])
        insort(fewest, begins + seconds)
    return max(its[-1] for its in ends if its)
