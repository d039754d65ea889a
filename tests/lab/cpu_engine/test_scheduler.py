"""The scheduler as a state machine: a budget that holds, and progress for everyone, whatever arrives, ends or is aborted."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_accel.lab.cpu_engine.sampling import SamplingParams
from rl_accel.lab.cpu_engine.scheduler import HEADROOM, Request, Scheduler


def request(name, prompt, response=1):
    return Request(str(name), [5] * prompt, SamplingParams(max_tokens=response), seed=0)


def begun(name, prompt, tokens):
    made = request(name, prompt, 100)
    made.tokens = [7] * tokens
    return made


class Host:
    """An engine without a model: what it does with a scheduler, one turn at a time."""

    def __init__(self, places, kv_tokens):
        self.scheduler = Scheduler(places, kv_tokens)
        self.running = []
        self.done = []
        self.log = []

    def note(self, event, chosen):
        self.log.append((event, chosen.request_id, len(chosen.tokens)))

    def turn(self):
        while (chosen := self.scheduler.next(self.running)) is not None:
            self.note("join", chosen)
            self.draw(chosen)
            if chosen not in self.done:
                self.running.append(chosen)
        if self.running:
            before = self.running
            self.keep(self.scheduler.preempt(self.running))
            preempted = [chosen for chosen in before if chosen not in self.running]
            if preempted:  # no more than has to be: the last of them does not fit
                last = min(preempted, key=lambda chosen: chosen.arrival)
                assert sum(chosen.length for chosen in (*self.running, last)) > self.scheduler.kv_tokens
            for chosen in preempted:
                self.note("preempt", chosen)
            for chosen in self.running:
                self.draw(chosen)
            self.keep([row for row, chosen in enumerate(self.running) if chosen not in self.done])

    def draw(self, chosen):
        chosen.tokens.append(7)
        if len(chosen.tokens) >= chosen.params.max_tokens:
            self.done.append(chosen)
            self.note("end", chosen)

    def keep(self, rows):
        # Rows that stay change places, as in the engine.
        self.running = [self.running[row] for row in reversed(rows)]

    def drop(self, chosen):
        self.note("end", chosen)
        self.scheduler.drop(lambda other: other is chosen)
        self.running = [other for other in self.running if other is not chosen]


def test_a_request_joins_others_only_with_some_room_to_grow():
    scheduler = Scheduler(8, kv_tokens=100)
    old = begun("old", 20, 5)
    wide, fits = 100 - 25 - 2 * HEADROOM + 1, 100 - 25 - 2 * HEADROOM
    scheduler.add(request("wide", wide))
    scheduler.add(request("narrow", 1))
    assert scheduler.next([old]) is None  # and the narrow one does not overtake
    assert scheduler.next([]).request_id == "wide"
    scheduler.drop(lambda _: True)
    scheduler.add(request("fits", fits))
    assert scheduler.next([old]).request_id == "fits"


@pytest.mark.parametrize("budget", [0, 1, -5, 10.0, True, "100"])
def test_a_budget_that_is_none_is_refused(budget):
    with pytest.raises(ValueError, match="kv_tokens wants an integer of at least 2, or None"):
        Scheduler(8, kv_tokens=budget)


def assert_progress(log):
    """A preempted request comes back only after another has ended, and never leaves again as it came."""
    away, left_with, ends = {}, {}, 0
    for event, name, tokens in log:
        if event == "end":
            ends += 1
            away.pop(name, None)
        elif event == "preempt":
            assert tokens > left_with.get(name, 0)
            away[name], left_with[name] = ends, tokens
        elif name in away:
            assert ends > away.pop(name)
    assert not away


_BUDGET = 60
_ARRIVE = st.tuples(st.just("arrive"), st.integers(1, 40), st.integers(1, 20))
_TURNS = st.tuples(st.just("turns"), st.integers(1, 6))
_ABORT = st.tuples(st.just("abort"), st.integers(0, 30))


@settings(max_examples=400, deadline=None)
@given(places=st.integers(1, 6), events=st.lists(st.one_of(_ARRIVE, _TURNS, _ABORT), max_size=40))
def test_the_budget_holds_the_oldest_always_advances_and_all_end(places, events):
    host = Host(places, _BUDGET)
    every, live = [], []

    def turn():
        live[:] = [made for made in live if made not in host.done]
        before = [len(made.tokens) for made in live]
        host.turn()
        if live:
            assert len(live[0].tokens) > before[0]
        assert all(len(made.tokens) >= had for made, had in zip(live, before, strict=True))
        assert sum(made.length - 1 for made in host.running) <= _BUDGET  # what has been read, as in the engine
        assert len(host.running) <= places
        # At any time the oldest run: everything that runs came before everything that waits.
        arrivals = sorted(made.arrival for made in host.running) + [made.arrival for made in host.scheduler.waiting]
        assert arrivals == sorted(arrivals)

    for kind, *values in events:
        if kind == "arrive":
            made = request(len(every), *values)
            every.append(made)
            host.scheduler.check_fits(made, sum(values))
            host.scheduler.add(made)
            live.append(made)
        elif kind == "turns":
            for _ in range(values[0]):
                turn()
        elif live:
            host.drop(live.pop(values[0] % len(live)))
    needed = sum(made.params.max_tokens for made in live)
    for _ in range(needed):  # the oldest alone draws one a turn
        turn()
    assert not host.running
    assert not host.scheduler.waiting
    assert all(made in host.done for made in live)
    assert host.scheduler.preempted == 0
    assert host.scheduler.preemptions == sum(made.preemptions for made in every)
    assert_progress(host.log)
