"""Tests balanced rollouts: order, slots, caches and moves by examples, and random events against a second bookkeeping."""

import math
import random
from collections import Counter

import pytest

from rl_accel.features import BalanceFlags
from rl_accel.rollout.balance import HOME_MARGIN, Balance, end_bound_at_arrival


class Host:
    """Carries out instructions and keeps books: where each response runs, in which order they were bound."""

    def __init__(self, slots=1, replicas=1, cache=math.inf, ordered=True, together=False, **flags):
        self.core = Balance(slots, BalanceFlags(**flags), ordered, together)
        self.now, self.at, self.order, self.stops = 0.0, {}, [], {}
        for number in range(replicas):
            self.carry_out(self.core.add_replica(f"r{number}", 0.0, cache))

    def carry_out(self, instructions):
        for ticket, replica, stop in instructions:
            if stop:
                assert self.at[ticket] == replica
                assert ticket not in self.stops
                self.stops[ticket] = replica
            else:
                assert ticket not in self.at, "nothing is bound twice"
                self.at[ticket] = replica
                self.order.append(ticket)
        books, core = Counter(self.at.values()), self.core.running()
        assert {name: books[name] for name in core} == core
        assert len(self.core) == len(self.at) + self.core.waiting

    def request(self, *tickets, prompt=None, **more):
        for ticket in tickets:
            self.carry_out(self.core.request(ticket, self.now, ticket[0] if prompt is None else prompt, **more))

    def over(self, ticket, tokens=None):
        self.at.pop(ticket, None)
        self.stops.pop(ticket, None)
        self.carry_out(self.core.over(ticket, self.now, tokens))

    def again(self, ticket, tokens=None):
        was_stopped = self.stops.pop(ticket, None)
        assert tokens is None or was_stopped
        del self.at[ticket]
        self.carry_out(self.core.again(ticket, self.now, tokens))

    def tick(self):
        self.carry_out(self.core.tick(self.now))

    def teach(self, **lengths):
        """Complete one response of each prompt with that length."""
        for prompt, length in lengths.items():
            self.request("teach " + prompt, prompt=prompt)
            self.over("teach " + prompt, length)

    def block(self):
        """Take all slots; :meth:`unblock` gives back one after the other and returns the order in which others came."""
        self.blockers = []
        while not self.core.waiting:
            self.blockers.append(f"block{len(self.blockers)}")
            self.request(self.blockers[-1], prompt="blocks")
        self.over(self.blockers.pop())
        self.order.clear()

    def unblock(self):
        for ticket in self.blockers:
            self.over(ticket)
        while self.core.waiting:
            self.over(next(iter(self.at)))
        return self.order


class TestOrder:
    def test_a_response_waits_until_a_replica_has_a_place(self):
        host = Host(slots=16)
        host.request(*(f"t{number}" for number in range(20)))
        assert host.order == [f"t{i}" for i in range(17)], "one more than there are slots is ready in the engine"
        host.over("t5", 10)
        assert host.order[17:] == ["t17"]
        host.carry_out(host.core.add_replica("r1", 1.0))
        assert host.order[18:] == ["t18", "t19"]

    @pytest.mark.parametrize(
        ("ordered", "order"),
        [(True, ["l1", "m1", "s1", "l2", "m2", "m3", "s2"]), (False, ["s1", "s2", "m1", "m2", "m3", "l1", "l2"])],
        ids=["ordered", "as they arrive"],
    )
    def test_one_response_of_each_prompt_then_those_expected_to_be_longest(self, ordered, order):
        host = Host(ordered=ordered)
        host.teach(s=10, m=100, l=1000)
        host.block()
        host.request("s1", "s2", "m1", "m2", "m3", "l1", "l2")
        assert host.unblock() == order

    def test_what_a_sibling_has_shown_in_this_step_counts(self):
        host = Host()
        host.teach(a=100, b=100)
        host.block()
        host.request("a1", "b1", "a2", "b2")
        host.over(host.blockers.pop())
        host.over(host.blockers.pop())
        assert host.order == ["a1", "b1"]
        host.over("b1", 900)
        assert host.order[2:] == ["b2"]

    def test_a_running_sibling_that_has_come_far_says_that_a_prompt_is_long(self):
        host = Host(slots=2)
        for number in range(20):  # a second a token
            host.request(f"x{number}")
            host.now += 10 + 10 * (number % 3)
            host.over(f"x{number}", 10 + 10 * (number % 3))
        host.tick()
        host.request("a1")
        host.now += 25
        host.request("b1", "c1", "b2", "a2")
        host.tick()
        host.over("c1", 1)
        assert host.order[-1] == "a2"

    def test_a_replica_gets_the_next_if_it_has_the_fewest(self):
        host = Host(slots=8, replicas=4)
        host.request(*(f"t{number}" for number in range(32)))
        assert set(host.core.running().values()) == {8}
        for ticket in [ticket for ticket, replica in host.at.items() if replica == "r2"][:3]:
            host.over(ticket, 1)
        host.request("u", "v", "w")
        assert {host.at[ticket] for ticket in ("u", "v", "w")} == {"r2"}


class TestHomes:
    def test_the_next_turn_goes_back_unless_its_replica_is_much_fuller(self):
        host = Host(slots=32, replicas=2)
        host.request(*(f"t{number}" for number in range(2 * HOME_MARGIN)), home="r1")
        assert list(host.at.values()) == ["r1"] * (HOME_MARGIN + 1) + ["r0", "r1", "r0"]
        host.request("gone", home="r9")
        assert host.at["gone"] == "r0"

    def test_the_next_turn_comes_before_what_has_not_begun(self):
        host = Host()
        host.block()
        host.request("a1")
        host.request("b2", home="r0")
        assert host.unblock() == ["b2", "a1"]

    def test_responses_of_a_prompt_stay_together_if_they_are_to(self):
        host = Host(slots=16, replicas=4, together=True)
        host.request(*(f"{prompt}{number}" for number in range(4) for prompt in "abcd"))
        for prompt in "abcd":
            assert len({host.at[f"{prompt}{number}"] for number in range(4)}) == 1


class TestCaches:
    def test_a_cache_is_filled_as_far_as_responses_are_expected_to_grow(self):
        host = Host(slots=100, cache=1000)
        host.teach(a=190, b=190)
        host.request(*(f"a{number}" for number in range(10)), prompt_tokens=10)
        assert len(host.at) == 5
        host.over("a0", 190)
        assert len(host.at) == 5

    def test_responses_that_end_at_other_times_share_the_place(self):
        host = Host(slots=100, cache=1000)
        for _ in range(30):
            host.teach(s=100, l=700)
        host.request("l1", *(f"s{number}" for number in range(20)))
        assert 6 <= len(host.at) <= 9, "when the short ones end, each with 100, the long one has 100 as well"

    @pytest.mark.parametrize(
        ("cache", "begin"), [(100, 1), (math.inf, 4)], ids=["too small for one: it runs alone", "unknown: no limit"]
    )
    def test_responses_larger_than_a_cache(self, cache, begin):
        host = Host(slots=4, cache=cache)
        host.teach(a=10**9)
        host.request("a0", "a1", "a2", "a3", prompt_tokens=10**9)
        assert len(host.at) == begin


def play(host, lengths, seconds, until=math.inf):
    """Generate ``lengths`` by ticket, on replicas whose tokens take ``seconds(running)``, and stop what is to stop."""
    tokens, parts = dict.fromkeys(lengths, 0.0), dict.fromkeys(lengths, 0.0)
    trail = Counter()
    while host.core and host.now < until:
        host.now += 1.0
        loads = host.core.running()
        for ticket, replica in list(host.at.items()):
            parts[ticket] += 1.0 / seconds(loads[replica])
            if tokens[ticket] + parts[ticket] >= lengths[ticket]:
                host.over(ticket, round(lengths[ticket] - tokens[ticket]))
        host.tick()
        for ticket in list(host.stops):
            tokens[ticket] += round(parts[ticket])
            trail[ticket] += 1
            host.again(ticket, round(parts[ticket]))
            parts[ticket] = 0.0
    return trail


def lagging(host, seconds, **more):
    """Eight long responses that share one replica beside one that is idle, after it was learnt how fast these are."""
    rng = random.Random(0)
    for load in (1, 2, 4, 8):
        lengths = {f"{load} {i}": rng.randint(20, 60) for i in range(2 * load)}
        host.request(*lengths, prompt="x")
        play(host, lengths, seconds)
    lengths = {f"l{i}": 400 + i for i in range(8)} | {f"s{i}": 5 for i in range(8)}
    host.request(*(f"l{number}" for number in range(8)), home="r0", **more)
    host.request(*(f"s{number}" for number in range(8)), home="r1", **more)
    began = host.now
    return play(host, lengths, seconds), host.now - began


class TestMoves:
    def test_what_lags_goes_on_where_it_is_faster_and_no_more_often_than_allowed(self):
        stays, longer = lagging(Host(slots=64, replicas=2, max_moves=0), lambda running: 0.5 + 0.5 * running)
        moved, shorter = lagging(Host(slots=64, replicas=2, max_moves=1), lambda running: 0.5 + 0.5 * running)
        assert not stays
        assert moved
        assert set(moved.values()) == {1}
        assert shorter < longer

    def test_where_load_costs_no_time_nothing_moves_but_with_a_margin_of_zero(self):
        assert not lagging(Host(slots=64, replicas=2), lambda running: 1.0)[0]
        trail, _ = lagging(Host(slots=64, replicas=2, margin=0.0), lambda running: 1.0)
        assert sum(trail.values()) > 3

    def test_nothing_moves_that_may_not(self):
        trail, _ = lagging(Host(slots=64, replicas=2, margin=0.0), lambda running: running, movable=False)
        assert not any(ticket[0] in "ls" for ticket in trail)

    def test_nothing_moves_while_anything_waits(self):
        host = Host(slots=1, replicas=2, margin=0.0)
        host.request(*"abcdef")
        host.tick()
        assert not host.stops


class TestPutOff:
    """Two rollouts of 256 responses to as many prompts, 16 of them long, on as many slots."""

    def rollout(self, host, **more):
        took, trails = [], []
        for visit in range(2):
            lengths = {f"{visit} {n}": 400 if n < 16 else 10 + n % 20 for n in range(256)}
            tickets = list(lengths)
            random.Random(visit).shuffle(tickets)
            for ticket in tickets:
                host.request(ticket, prompt=ticket, **more)
            began = host.now
            trails.append(play(host, lengths, lambda running: 1.0))
            took.append(host.now - began)
        return took[1], trails[1]

    def test_what_has_come_far_goes_on_once_all_have_begun(self):
        kept, stays = self.rollout(Host(slots=8, replicas=2, max_moves=0))
        took, trail = self.rollout(Host(slots=8, replicas=2))
        assert not stays
        assert len(trail) <= 16, "as many as there are slots"
        assert len(trail.keys() & {f"1 {n}" for n in range(16)}) > 8
        assert set(trail.values()) == {1}
        assert took < 0.8 * kept

    @pytest.mark.parametrize(("ordered", "movable"), [(False, True), (True, False)])
    def test_not_where_order_or_moves_are_not_wanted(self, ordered, movable):
        _, trail = self.rollout(Host(slots=8, replicas=2, ordered=ordered), movable=movable)
        assert not trail


def test_a_response_of_a_dead_replica_goes_back_into_the_queue_before_others():
    host = Host(slots=1, replicas=2)
    host.request(*"abcde")
    dead = host.at["a"]
    host.core.remove_replica(dead)
    lost = [ticket for ticket, replica in host.at.items() if replica == dead]
    for ticket in lost:
        host.again(ticket)
    host.order.clear()
    while host.at:
        host.over(next(iter(host.at)), 5)
    assert host.order[: len(lost)] == lost


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda core: core.request("a", 0.0), "ticket must be new, found 'a' twice"),
        (lambda core: core.over("c", 0.0, 5), "of a response that runs, but 'c' waits"),
        (lambda core: core.again("c", 0.0), "of a response that runs, but 'c' waits"),
        (lambda core: Balance(0, BalanceFlags()), "slots must be at least 1, found 0"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(call, said):
    host = Host()
    host.request(*"abc")
    with pytest.raises(ValueError, match=said):
        call(host.core)
    assert (host.core.running(), host.core.waiting) == ({"r0": 2}, 1)


def test_events_of_responses_that_are_over_or_were_not_to_stop_change_nothing():
    host = Host()
    host.request("a")
    assert host.core.over("x", 0.0) == host.core.over("x", 0.0, 3) == []
    assert host.core.again("x", 0.0) is host.core.again("x", 0.0, 3) is host.core.again("a", 0.0, 3) is None
    assert host.core.running() == {"r0": 1}


def test_numbers_of_a_step():
    host = Host(slots=1, replicas=2)
    assert host.core.take_numbers() == {}
    tickets = ("a1", "b1", "c1", "d1", "e1", "f1")
    host.request(*tickets)
    for ticket in tickets:
        host.now += 1.0
        host.over(ticket, 100)
    numbers = host.core.take_numbers()
    assert (numbers["slots_in_use"], numbers["moves"]) == (1.0, 0)
    assert numbers["queue_length"] == numbers["queue_wait_seconds"] == pytest.approx((1 + 2) / 6)
    host.now += 100.0  # a step of training
    for ticket in ("a2", "b2"):
        host.request(ticket)
        host.now += 1.0
        host.over(ticket, 200)
    numbers = host.core.take_numbers()
    assert numbers["slots_in_use"] == 0.5
    assert 0.48 < numbers["length_error_p50"] <= numbers["length_error_p90"] < 0.5, "100 was expected"
    assert numbers["slots_in_use_lowest"] + numbers["slots_in_use_highest"] == 1.0


def test_what_binding_at_arrival_would_have_taken():
    assert end_bound_at_arrival([(0.0, 1.0)] * 4, 2, 1) == 2.0
    assert end_bound_at_arrival([(0.0, 9.0), (0.0, 1.0), (0.0, 9.0), (0.0, 1.0)], 2, 1) == 18.0
    assert end_bound_at_arrival([(0.0, 9.0), (0.0, 1.0), (2.0, 9.0), (2.0, 1.0)], 2, 1) == 11.0
    assert end_bound_at_arrival([(0.0, 9.0), (0.0, 1.0), (0.0, 9.0), (0.0, 1.0)], 2, 2) == 9.0


@pytest.mark.parametrize("seed", [0, 1, 5, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3, 4, 6))])
def test_random_events_lose_nothing_and_leak_no_place(seed):
    """10,000 events each: replicas die, come and are removed; clients are cancelled; late events of what is over."""
    rng = random.Random(seed)
    slots, ordered = rng.choice([1, 4, 20]), rng.random() < 0.7
    cache = rng.choice([math.inf, 400])
    host = Host(slots, 3, cache, ordered, rng.random() < 0.5, margin=rng.choice([0.0, 1.0]), max_moves=2)
    core, live, wanted, number = host.core, ["r0", "r1", "r2"], {}, 3
    done = Counter()
    for event in range(10_000):
        host.now += rng.expovariate(20)
        running = list(host.at)
        kind = rng.random()
        if kind < 0.42 and len(core) < 200:
            ticket = f"t{event}"
            wanted[ticket] = 0
            home = rng.choice(["", "", *live, "r0"])
            prompt, tokens, movable = rng.randrange(40), rng.randrange(20), rng.random() < 0.9
            host.request(ticket, prompt=prompt, prompt_tokens=tokens, home=home, movable=movable)
        elif kind < 0.75 and running:
            ticket = rng.choice(running)
            done[ticket] += 1
            host.over(ticket, rng.randrange(1, 60))
        elif kind < 0.80 and wanted:
            ticket = rng.choice(list(wanted))  # over already, waiting or running
            if ticket in host.at or ticket not in done:
                done[ticket] += 1
            host.over(ticket)
        elif kind < 0.90 and host.stops:
            host.again(rng.choice(list(host.stops)), rng.randrange(60))
        elif kind < 0.96:
            host.tick()
        elif kind < 0.97 and live:
            name = live.pop(rng.randrange(len(live)))
            core.remove_replica(name)
            if rng.random() < 0.7:  # it died; else what it runs comes to its end
                for ticket in [ticket for ticket, replica in host.at.items() if replica == name]:
                    host.stops.pop(ticket, None)
                    host.again(ticket)
        elif kind < 0.98 and len(live) < 5:
            number += 1
            live.append(f"r{number}")
            host.carry_out(core.add_replica(live[-1], host.now, cache))
        free = [name for name, count in core.running().items() if count < slots]
        assert not core.waiting or not free or cache < math.inf, "nothing waits while there are slots"
        assert all(count <= 2 * slots for count in core.running().values())
        if event % 5000 == 0:
            core.take_numbers()
    host.carry_out(core.add_replica("last", host.now))
    while len(core):
        ticket = next(iter(host.at))  # if nothing runs any more, this fails
        done[ticket] += 1
        host.over(ticket, 1)
    assert done == Counter(wanted.keys())
    assert [core._groups, core._queue, core._begun, core._preempted] == [{}] * 4
