"""Balanced rollouts: which replica generates which response, and when. Bound late, longest first, put off or moved.

Moves, longest first and rollouts in parts are Seer's (2025), the caches' future peak is the Past-Future scheduler's (ASPLOS'25).
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
"""Requests that the replica of a conversation may have more than the emptiest one and still get its next turn."""
AHEAD_SECONDS = 0.5
"""So many seconds, or fewer, requests wait inside an engine, so that the next one begins without a round trip."""
PROMPTS, PER_PROMPT, RECENT = 100_000, 32, 4096
"""Prompts whose lengths are known, lengths of each, and lengths of all that expectations are made of."""
PARTS, FEWEST = 512, 16
"""Parts of responses that the engines' speed is fitted to, and how many it takes."""
PUT_OFF = 1 / 16
"""The largest share of responses that are put off."""
READ_SHARE, READ_WEIGHT = 1 / 64, 1000
"""Seconds to read a token again over those to generate one, until moves of so many tokens have shown it."""


class Decision(NamedTuple):
    """Have ``replica`` generate the response of ``ticket``; or ``stop`` it there, so that it goes on elsewhere."""

    ticket: str
    replica: str
    stop: bool = False


@dataclass(slots=True, eq=False)
class _Replica:
    """``area`` is the integral of the number of running responses over time, until ``changed``."""

    name: str
    cache_tokens: float
    changed: float
    area: float = 0.0
    running: "dict[str, _Response]" = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.running)

    def count(self, now: float) -> float:
        """Bring ``area`` up to ``now`` and return it."""
        self.area += len(self.running) * (now - self.changed)
        self.changed = now
        return self.area


@dataclass(slots=True, eq=False)
class _Group:
    """The ``count`` responses of one prompt that are not over; ``lengths`` of others. The least ``order`` is first in the queue."""

    prompt: str
    lengths: deque[int]
    waiting: "deque[_Response]" = field(default_factory=deque)
    running: "dict[str, _Response]" = field(default_factory=dict)
    count: int = 0
    home: str = ""
    order: tuple[float, ...] = ()


@dataclass(slots=True, eq=False)
class _Response:
    """A response that is not over; it waits without a ``replica``. ``tokens`` and ``seconds`` are those of its earlier parts."""

    ticket: str
    group: _Group
    prompt_tokens: int
    movable: bool
    arrived: float
    target: str  # where it should go
    tokens: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    since: float = 0.0  # when it began to wait or was bound
    replica: _Replica | None = None
    area: float = 0.0  # of its replica when it was bound
    expected: float = 0.0
    predicted: float = 0.0  # when it was bound first; 0: nothing was known
    moves: int = 0
    stopping: bool = False


class _Speed:
    """How long replicas take, fitted to parts of responses: ``start + tokens * (token + request * running) + again * read``.

    ``running`` is the mean number of requests, ``again`` the tokens that were read again after a move.
    """

    def __init__(self) -> None:
        self._parts: deque[tuple[float, ...]] = deque(maxlen=PARTS)
        self._new = 0
        self.token = self.request = self.start = self.read = 0.0
        self.part = 0.0  # mean seconds of a part

    def add(self, tokens: int, running: float, again: float, seconds: float) -> None:
        self._parts.append((tokens, tokens * running, 1.0, again, seconds))
        self._new += 1

    def fit(self) -> None:
        """Bring the numbers up to date, by least squares."""
        if len(self._parts) >= FEWEST and self._new * 8 >= len(self._parts):
            self._new = 0
            prior = (-READ_SHARE * READ_WEIGHT, 0.0, 0.0, READ_WEIGHT, 0.0)
            parts = np.array([*self._parts, prior])
            found = np.linalg.lstsq(parts[:, :4], parts[:, 4], rcond=None)[0]
            self.token, self.request, self.start, self.read = np.maximum(found, 0.0).tolist()
            self.part = float(parts[:-1, 4].mean())

    def of(self, running: float) -> float:
        """Return the seconds of a token with so many requests; 0 if there was not enough to fit."""
        return self.token + self.request * running


class Balance:
    """Decides where and when responses are generated. No I/O and no clock: events in, decisions out.

    A response waits until a replica has a place: fewer running than ``places`` (and what they complete in :data:`AHEAD_SECONDS`),
    and, where the size of its key-value cache is known, room for the most that all of them should need at any time. First are
    responses that have begun (next turns, what was moved or lost its replica), then one of each prompt, then those with the most
    expected tokens: the mean of

    - the prompt's responses that were longer than this one is, of this epoch and of earlier ones,
    - for each running one that has come farther, and for this one itself: the mean of recent responses longer than that.

    Who will be long is known too late, and a long response that begins last is waited for. So while some have not begun, those that
    have come far are put off (stopped, to go on after all others have begun), as many as there are places, :data:`PUT_OFF` at most:
    from then on they run side by side. How far is far follows from recent lengths: so many responses should be longer.

    A response goes to the replica with the fewest; one that has begun to its own, unless that has :data:`HOME_MARGIN` more. When
    nothing waits, the response with the most expected tokens left moves from a replica to an emptier one, if that should
    save ``flags.margin`` times what it costs, and ``flags.max_moves`` times at most.

    The driver calls ``request`` for a response, carries out the decisions that each call returns, and reports ``over`` or, after a
    response was stopped or its replica died, ``again``. It calls ``tick`` a few times a second. ``now`` is in seconds of one clock.
    What concerns a response that is over is ignored; what cannot be raises ValueError and changes nothing.

    Args:
        places: requests that a replica runs at once.
        flags: the user's.
        ordered: False: in the order of arrival.
        together: responses of a prompt go to the same replica.

    Attributes:
        lengths: of complete responses, by prompt; what an earlier run knew, for :meth:`learn`.
    """

    def __init__(self, places: int, flags: BalanceFlags, ordered: bool = True, together: bool = False) -> None:
        if places < 1:
            raise ValueError(f"places must be at least 1, found {places}")
        self.places, self.flags, self.ordered, self.together = places, flags, ordered, together
        self._speed, self._numbers = _Speed(), _Numbers()
        self.lengths: dict[str, deque[int]] = {}
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._new = 0  # of these, since they were sorted
        self._ascending: list[int] = []
        self._sums: list[int] = []  # of each of these and all longer ones
        self._replicas: dict[str, _Replica] = {}
        self._responses: dict[str, _Response] = {}
        self._groups: dict[str, _Group] = {}
        self._begun: dict[str, _Response] = {}  # in the queue, before all of ``_queue``
        self._put_off: dict[str, _Response] = {}  # behind it
        self._queue: dict[str, _Group] = {}
        self.waiting = 0

    def __len__(self) -> int:
        return len(self._responses)

    def learn(self, lengths: Mapping[str, Sequence[int]]) -> None:
        """Begin with the ``lengths`` of an earlier run."""
        for prompt, its in lengths.items():
            self.lengths[prompt] = deque(its, PER_PROMPT)
            self._recent += its
            self._new += len(its)

    def running(self) -> dict[str, int]:
        """Return the number of responses on each replica."""
        return {name: len(replica) for name, replica in self._replicas.items()}

    def add_replica(self, name: str, now: float, cache_tokens: float = math.inf) -> list[Decision]:
        """A replica has come; ``cache_tokens``: that its key-value cache holds. One that is there is told its size."""
        self._replicas.setdefault(name, _Replica(name, cache_tokens, now)).cache_tokens = cache_tokens
        return self._fill(now)

    def remove_replica(self, name: str) -> None:
        """A replica gets nothing more. What it runs is ``over`` some time, or goes on ``again`` if it is dead."""
        self._replicas.pop(name, None)

    def request(
        self, ticket: str, now: float, prompt: str = "", prompt_tokens: int = 0, home: str = "", movable: bool = True
    ) -> list[Decision]:
        """A response is to be generated; ``ticket`` is its name, unique.

        ``prompt`` is the same for all responses of a prompt, in every epoch. ``home`` is the replica of the last turn, if there was
        one. Only what is ``movable`` can go on elsewhere after it was stopped.
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
        """A response is complete with ``tokens`` more tokens, or, without them, not wanted any more."""
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
        """A response has stopped after ``tokens`` more tokens because it was to, or, without them, its replica died.

        Returns None, and changes nothing, if it is over or was not to stop.
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
        """Look again at everything that time changes."""
        self._speed.fit()
        for replica in self._replicas.values():
            for response in replica.running.values() if replica.cache_tokens < math.inf else ():
                response.expected = self._expect(response.group, self._tokens(response, now), now)
        for group in self._queue.values():
            self._set_order(group, now)
        return self._fill(now) + self._stop_long(now) or self._move(now)

    def take_numbers(self) -> dict[str, float]:
        """Return what happened since the last call, by name; {} if no response was completed."""
        numbers, self._numbers = self._numbers, _Numbers()
        return numbers.summary([*self._replicas], self.places)

    # How

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
        """How long a response of ``group`` is expected to be that has come to ``tokens``."""
        samples = [float(length) for length in group.lengths if length > tokens]
        if self._speed.of(1):
            far = (self._tokens(other, now) for other in group.running.values())
            samples += [self._beyond(other) for other in far if other > tokens]
        return (sum(samples) + self._beyond(tokens)) / (len(samples) + 1)

    def _beyond(self, tokens: float) -> float:
        """The mean length of recent responses longer than ``tokens``; twice ``tokens`` if there was none."""
        if self._new > len(self._ascending) // 16:
            self._ascending, self._new = sorted(self._recent), 0
            self._sums = [*accumulate(reversed(self._ascending))][::-1]
        at = bisect_right(self._ascending, tokens)
        return self._sums[at] / (len(self._ascending) - at) if at < len(self._ascending) else 2 * tokens

    def _tokens(self, response: _Response, now: float) -> float:
        """How many tokens a response should have by now."""
        replica, seconds = response.replica, now - response.since
        if replica is None or not self._speed.of(1) or seconds <= 0:
            return response.tokens
        running = max((replica.count(now) - response.area) / seconds, 1.0)
        return response.tokens + max(seconds - self._speed.start, 0.0) / self._speed.of(running)

    def _fill(self, now: float) -> list[Decision]:
        """Bind what waits, as far as there are places."""
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
        """Whether the cache of ``replica`` should hold ``response`` beside what runs until the end, at a token a step."""
        if replica.cache_tokens == math.inf or not replica.running:
            return True
        response.expected = self._expect(response.group, response.tokens, now)
        far = [(one, self._tokens(one, now)) for one in (response, *replica.running.values())]
        far.sort(key=lambda pair: pair[1] - pair[0].expected)  # when one of these ends, all before it still run
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
        """Stop responses that are to be put off, see above; nothing before as many were completed as are under way or wait."""
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
        """Stop a response that should go on elsewhere, if nothing waits; one at a time."""
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
        """The responses on ``replica`` that may go on elsewhere, and how many tokens each should have."""
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
    used: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # seconds of places, by replica
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
    """Return when the last of ``responses`` (arrival and seconds of each) had ended, if each was bound on arrival as verl does."""
    ends: list[list[float]] = [[] for _ in range(replicas)]
    for arrived, seconds in responses:
        fewest = min(ends, key=lambda its: len(its) - bisect_right(its, arrived))
        begins = arrived if len(fewest) < places else max(arrived, fewest[-places])
        insort(fewest, begins + seconds)
    return max(its[-1] for its in ends if its)
