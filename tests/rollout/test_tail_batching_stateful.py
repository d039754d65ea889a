"""Tests tail batching with random sequences of events against a separate bookkeeping that shares no code with it."""

import copy
import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rl_accel.features import TailBatchingFlags
from rl_accel.rollout.tail_batching import TailBatching, TailRun

pytestmark = pytest.mark.slow


class Books:
    """What a host can know for certain. Copied at a save, restored after a crash."""

    def __init__(self):
        self.offered = []
        self.outcome = {}  # prompt -> trained, rejected or failed
        self.used = set()  # response ids ever launched

    def unsettled(self):
        return {prompt for prompt in self.offered if prompt not in self.outcome}

    def settle(self, prompt, outcome):
        assert prompt in self.offered
        assert prompt not in self.outcome, f"{prompt} was {self.outcome[prompt]} and is now {outcome}"
        self.outcome[prompt] = outcome


@settings(max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
class Host(RuleBasedStateMachine):
    @initialize(
        prompts=st.integers(1, 4),
        responses=st.integers(1, 3),
        flags=st.fixed_dictionaries(
            {
                "prompt_ratio": st.sampled_from([1.0, 1.25, 1.5, 2.0]),
                "response_ratio": st.sampled_from([1.0, 1.5, 2.0]),
                "queue_threshold": st.none() | st.integers(1, 6),
                "max_deferrals": st.integers(1, 3),
                "max_retries": st.integers(0, 2),
            }
        ),
        filtered=st.booleans(),
    )
    def start(self, prompts, responses, flags, filtered):
        self.P0, self.R0, self.filtered, self.retries = prompts, responses, filtered, flags["max_retries"]
        self.surplus = -(-responses * flags["response_ratio"] // 1)
        self.run = TailRun(prompts, responses, TailBatchingFlags(**flags), filtered)
        self.books = Books()
        self.now = 0.0
        self.saved = None
        self.batches = Counter()
        self.boot(TailBatching(self.run))

    def boot(self, core):
        """A new process: nothing is under way."""
        self.core = core
        self.open = self.stopping = False
        self.request = None
        self.live, self.attempts, self.gone = {}, {}, []

    # Decisions

    def carry_out(self, decisions):
        for decision in decisions:
            getattr(self, "on_" + type(decision).__name__.lower())(decision)

    def on_requestprompts(self, decision):
        assert not self.stopping
        room = self.steps * self.P0 - len(self.books.unsettled())
        assert 0 < decision.count <= room, "more than can be trained"
        self.request = decision.count

    def on_roundstarted(self, decision):
        assert not self.open
        assert not self.stopping
        assert not self.live, "an older response was still about when a round began"
        assert decision.kind in ("short", "long", "final")
        assert decision.responses == (self.surplus if decision.kind == "short" else self.R0)
        assert decision.prompts >= self.P0
        assert decision.kind == "short" or decision.prompts == self.P0
        self.open, self.request, self.attempts, self.tally = True, None, {}, Counter()
        self.number, self.kind, self.responses = decision.number, decision.kind, decision.responses
        self.to_launch = self.started = decision.prompts

    def on_launch(self, decision):
        prompt, ids = decision.prompt_id, decision.response_ids
        assert self.open
        assert prompt in self.books.unsettled()
        assert not self.books.used & set(ids), "a response id came back"
        self.books.used |= set(ids)
        if prompt in self.attempts:
            assert len(ids) == 1
            retries = self.attempts[prompt].retries_due.pop()
        else:
            assert len(ids) == self.responses
            # Which responses finished generating, in order, and how often those to be launched again were tried
            self.attempts[prompt] = SimpleNamespace(generated=[], retries_due=[], kept=False)
            self.to_launch -= 1
            self.tally["prompts_admitted"] += 1
            retries = 0
        for response_id in ids:
            fresh = {"state": "generating", "tokens": 0, "cancelled": False}
            self.live[response_id] = SimpleNamespace(prompt=prompt, retries=retries, **fresh)

    def on_cancel(self, decision):
        assert decision.response_ids
        for response_id in decision.response_ids:
            response = self.live[response_id]
            assert response.prompt == decision.prompt_id
            assert not response.cancelled
            response.cancelled = True
            self.tally["responses_cancelled"] += 1
            if response.state == "scored":
                self.settle_response(response_id, response.tokens)
        if not self.counting(decision.prompt_id):
            del self.attempts[decision.prompt_id]
        else:  # surplus of a prompt whose R0 are there
            assert len(self.attempts[decision.prompt_id].generated) == self.R0

    def counting(self, prompt):
        return [r for r in self.live.values() if r.prompt == prompt and not r.cancelled]

    def check_group(self, group):
        attempt = self.attempts[group.prompt_id]
        assert list(group.response_ids) == attempt.generated, "a group must be the first R0 to finish generating"
        assert len(group.response_ids) == self.R0
        assert all(self.live[i].state == "scored" for i in group.response_ids)
        assert len(self.counting(group.prompt_id)) == self.R0, "surplus was neither cancelled nor used"

    def on_checkgroup(self, decision):
        assert self.filtered
        self.check_group(decision.group)
        prompt, passes = decision.group.prompt_id, self.rng.random() >= self.reject_share
        if passes:
            self.attempts[prompt].kept = True
        else:
            self.books.settle(prompt, "rejected")
            self.tally["prompts_rejected"] += 1
            for response_id in decision.group.response_ids:
                self.tally["rejected_tokens"] += self.live.pop(response_id).tokens
                self.gone.append(response_id)
            del self.attempts[prompt]
        self.carry_out(self.core.group_checked(prompt, passes, self.now))

    def on_promptfailed(self, decision):
        assert self.fatal == decision.prompt_id
        self.fatal = None
        self.attempts.pop(decision.prompt_id, None)
        self.tally["prompts_failed"] += 1
        self.books.settle(decision.prompt_id, "failed")

    def on_trainbatch(self, decision):
        assert self.open
        assert (decision.number, decision.kind) == (self.number, self.kind)
        assert len({group.prompt_id for group in decision.groups}) == len(decision.groups) == self.P0
        for group in decision.groups:
            self.check_group(group)
            if self.filtered:
                assert self.attempts[group.prompt_id].kept
            self.books.settle(group.prompt_id, "trained")
            for response_id in group.response_ids:
                self.tally["used"] += self.live.pop(response_id).tokens
                self.gone.append(response_id)
        self.batches[decision.kind] += 1
        self.tally["prompts_trained"] += len(decision.groups)
        self.open, self.stopping, self.request = False, True, None

    def on_roundended(self, decision):
        assert not self.live, "a round ended before every cancelled response was acknowledged"
        assert self.stopping, "a round ended without a batch"
        metrics = decision.metrics
        assert metrics.kind == self.kind
        for name in ("prompts_trained", "prompts_admitted", "prompts_rejected", "prompts_failed"):
            assert getattr(metrics, name) == self.tally[name], name
        for name in ("responses_cancelled", "responses_failed"):
            assert getattr(metrics, name) == self.tally[name], name
        every = self.tally["used"] + self.tally["wasted"] + self.tally["rejected_tokens"]
        assert metrics.wasted_token_share == pytest.approx(self.tally["wasted"] / every if every else 0)
        assert metrics.oldest_deferral_rounds >= 0
        self.open = self.stopping = False
        self.request = None

    # Events

    def possible(self):
        """Everything that can happen to what is under way."""
        events = []
        for response_id, response in self.live.items():
            if response.state == "generating":
                events.append(("generate", response_id))
            elif response.state == "generated":
                events.append(("score", response_id))
            if response.cancelled:  # it can come to its end all the same before the cancellation reaches it
                events.append(("acknowledge", response_id))
            elif response.state != "scored":
                events.append(("fail", response_id))
        return events

    def act(self, event, rng, reject_share=0.3):
        self.now += rng.random()
        self.rng, self.reject_share = rng, reject_share
        kind, what = event
        response = self.live[what]
        attempt = self.attempts.get(response.prompt)
        if kind == "generate":
            response.state, response.tokens = "generated", rng.randrange(100)
            if not response.cancelled:
                attempt.generated.append(what)
                assert len(attempt.generated) <= self.R0, "surplus went on after R0 responses"
            self.carry_out(self.core.response_generated(what, response.tokens))
        elif kind == "score":
            response.state = "scored"
            if response.cancelled:
                self.settle_response(what, response.tokens)
            self.carry_out(self.core.response_scored(what, self.now))
        elif kind == "acknowledge":
            self.settle_response(what, tokens := rng.randrange(100))
            if rng.random() < 0.8:
                self.carry_out(self.core.response_aborted(what, tokens))
            else:
                self.carry_out(self.core.response_failed(what, tokens, self.now))
        elif kind == "fail":
            self.settle_response(what, tokens := rng.randrange(100))
            if what in attempt.generated:
                attempt.generated.remove(what)
            self.fatal, lost = None, rng.random() < 0.2
            if lost or response.retries < self.retries:
                attempt.retries_due.append(response.retries + (not lost))
            elif len(self.counting(response.prompt)) < self.R0:
                self.fatal = response.prompt
            self.tally["responses_failed"] += 1
            self.carry_out(self.core.response_failed(what, tokens, self.now, lost))
            assert self.fatal is None, "a prompt that failed for good was not reported"
            assert not attempt.retries_due, "a failed response was not retried"

    def settle_response(self, response_id, tokens):
        del self.live[response_id]
        self.gone.append(response_id)
        self.tally["wasted"] += tokens

    @precondition(lambda self: self.possible())
    @rule(count=st.integers(1, 60), failures=st.sampled_from([0.0, 0.05, 0.5, 1.0]), seed=st.integers(0, 2**16))
    def events(self, count, failures, seed):
        rng = random.Random(seed)
        for _ in range(count):
            if events := [e for e in self.possible() if e[0] != "fail" or rng.random() < failures]:
                self.act(rng.choice(events), rng)

    @precondition(lambda self: self.gone)
    @rule(pick=st.integers(0, 999))
    def late_message(self, pick):
        response_id = self.gone[pick % len(self.gone)]
        assert self.core.response_generated(response_id, 5) == []
        assert self.core.response_scored(response_id, self.now) == []
        assert self.core.response_failed(response_id, 5, self.now) == []
        assert self.core.response_aborted(response_id, 5) == []

    @precondition(lambda self: not self.open and not self.stopping and not self.request)
    @rule(steps=st.integers(1, 8))
    def begin(self, steps):
        self.steps = steps
        self.carry_out(self.core.begin_round(steps, self.now))
        assert self.open or self.request
        assert not self.open or self.to_launch == 0

    @rule(few=st.integers(1, 4), all_wanted=st.booleans())
    def offer(self, few, all_wanted):
        answers = all_wanted and self.request
        if not answers and len(self.books.unsettled()) > 40:
            return
        count = self.request if answers else few
        new = [f"1:{len(self.books.offered) + number}" for number in range(count)]
        self.books.offered += new
        self.request = None
        self.carry_out(self.core.offer(new, self.now))

    @rule()
    def save(self):
        self.saved = json.dumps(self.core.state_dict()), copy.deepcopy(self.books)

    @precondition(lambda self: self.saved)
    @rule()
    def crash(self):
        state, books = self.saved
        core = TailBatching(self.run)
        core.load_state_dict(json.loads(state))
        assert json.loads(json.dumps(core.state_dict())) == core.state_dict()
        self.books = copy.deepcopy(books)
        self.boot(core)

    # What must hold at any time

    @invariant()
    def nothing_is_lost(self):
        assert sorted(self.core.unsettled_prompts()) == sorted(self.books.unsettled())

    @invariant()
    def something_can_happen(self):
        if self.open or self.stopping:
            assert self.possible() or self.request, "deadlock"

    @invariant()
    def nothing_waits_without_need(self):
        """A batch is made as soon as it can be, and rejected and failed prompts are replaced at once."""
        if self.open:
            complete = [a for a in self.attempts.values() if sum(self.is_scored(i) for i in a.generated) == self.R0]
            assert len([a for a in complete if a.kept or not self.filtered]) < self.P0
            if not self.request and len(self.attempts) < self.started:
                assert len(self.books.unsettled()) >= self.steps * self.P0

    def is_scored(self, response_id):
        return self.live[response_id].state == "scored"

    def teardown(self):
        """From wherever it is, training comes to an end; batches enough for all prompts leave nothing behind."""
        self.play_round()
        steps = -(-len(self.books.unsettled()) // self.P0)
        for left in range(steps, 0, -1):
            self.begin(left)
            self.play_round()
        assert not self.books.unsettled(), "a prompt waits where it is never launched"

    def play_round(self):
        rng = random.Random(0)
        while self.open or self.stopping or self.request:
            if self.request:
                self.offer(0, True)
                continue
            events = [e for e in self.possible() if e[0] != "fail"]
            assert events, "deadlock"
            self.act(rng.choice(events), rng, reject_share=0.0)


TestTailBatching = Host.TestCase
