"""Random interleavings of everything that can happen to tail batching, checked against books that share no code with it.

The machine below is a host: it knows only the decisions it was given and the events it sent. It checks each decision
against its own books, can lose its process at any moment, and knows when nothing can happen any more.
"""

import copy
import json
import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rl_accel.features import TailBatchingFlags
from rl_accel.rollout.tail_batching import TailBatching
from rl_accel.rollout.tail_decisions import (
    Cancel,
    CheckGroup,
    EpochSettled,
    Finished,
    Launch,
    PromptFailed,
    RequestPrompts,
    RoundEnded,
    RoundStarted,
    TrainBatch,
)
from rl_accel.rollout.tail_prompts import TailRun

pytestmark = pytest.mark.slow


class Books:
    """What a host can know for certain. Copied at a save, restored after a crash."""

    def __init__(self):
        self.offered = {}  # prompt -> (domain, epoch)
        self.outcome = {}  # prompt -> trained, rejected or failed
        self.epoch = 1
        self.row = 0
        self.settled_epochs = set()
        self.used = set()  # response ids ever launched

    def unsettled(self):
        return self.offered.keys() - self.outcome.keys()

    def settle(self, prompt, outcome):
        assert prompt in self.offered
        assert prompt not in self.outcome, f"{prompt} was {self.outcome[prompt]} and is now {outcome}"
        self.outcome[prompt] = outcome


class Response:
    def __init__(self, prompt, retries):
        self.prompt, self.retries, self.state, self.tokens = prompt, retries, "generating", 0


class Attempt:
    """One launch of a prompt: which responses finished generating, in order, and which of them count."""

    def __init__(self):
        self.generated, self.scored, self.retries_due, self.verdict = [], set(), [], None


@settings(max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
class Host(RuleBasedStateMachine):
    @initialize(
        prompts=st.integers(1, 4),
        responses=st.integers(1, 3),
        ratio=st.sampled_from([1.0, 1.25, 1.5, 2.0, "auto"]),
        surplus=st.sampled_from([1.0, 1.5, 2.0]),
        threshold=st.none() | st.integers(1, 6),
        deferrals=st.integers(1, 3),
        retries=st.integers(0, 2),
        filtered=st.booleans(),
        split=st.integers(0, 3),
    )
    def start(self, prompts, responses, ratio, surplus, threshold, deferrals, retries, filtered, split):
        self.P0, self.R0, self.filtered, self.retries = prompts, responses, filtered, retries
        self.surplus = -(-responses * surplus // 1)
        self.quotas = {"code": split, "math": prompts - split} if 0 < split < prompts else {}
        flags = TailBatchingFlags(
            prompt_ratio=ratio,
            response_ratio=surplus,
            queue_threshold=threshold,
            max_deferrals=deferrals,
            max_retries=retries,
            domain_quotas=self.quotas,
        )
        self.run = TailRun(prompts, responses, flags, filtered)
        self.books = Books()
        self.now = 0.0
        self.saved = None
        self.batches = Counter()
        self.boot(TailBatching(self.run))

    def boot(self, core):
        """A new process: nothing is under way."""
        self.core = core
        self.open = self.settling = self.exhausted = self.was_exhausted = False
        self.request = None
        self.live, self.attempts, self.checks, self.gone, self.overtaken = {}, {}, [], [], []

    # Decisions

    def carry_out(self, decisions):
        for decision in decisions:
            getattr(self, "on_" + type(decision).__name__.lower())(decision)

    def on_requestprompts(self, decision: RequestPrompts):
        assert not self.settling
        assert not self.exhausted
        assert decision.counts
        assert all(count > 0 for count in decision.counts.values())
        assert set(decision.counts) <= (set(self.quotas) or {""})
        self.request = dict(decision.counts)

    def on_roundstarted(self, decision: RoundStarted):
        assert not self.open
        assert not self.settling
        assert not self.live, "an older response was still about when a round began"
        assert decision.kind in ("short", "long", "final")
        assert decision.responses == (self.surplus if decision.kind == "short" else self.R0)
        assert decision.prompts >= self.P0
        assert decision.kind == "short" or decision.prompts == self.P0
        self.open, self.request, self.attempts, self.tally = True, None, {}, Counter()
        self.number, self.kind, self.responses = decision.number, decision.kind, decision.responses
        self.was_exhausted = self.exhausted
        self.to_launch = self.started = decision.prompts

    def on_launch(self, decision: Launch):
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
            self.attempts[prompt] = Attempt()
            self.to_launch -= 1
            self.tally["admitted"] += 1
            retries = 0
        for response_id in ids:
            self.live[response_id] = Response(prompt, retries)

    def on_cancel(self, decision: Cancel):
        assert decision.response_ids
        for response_id in decision.response_ids:
            response = self.live[response_id]
            assert response.prompt == decision.prompt_id
            assert response.state != "cancelled"
            response.state = "cancelled"
            self.tally["cancelled"] += 1
        if not self.counting(decision.prompt_id):
            del self.attempts[decision.prompt_id]
            self.overtaken += [group for group in self.checks if group.prompt_id == decision.prompt_id]
            self.checks = [group for group in self.checks if group.prompt_id != decision.prompt_id]
        else:  # surplus of a prompt whose R0 are there
            assert len(self.attempts[decision.prompt_id].generated) == self.R0

    def counting(self, prompt):
        return [r for r in self.live.values() if r.prompt == prompt and r.state != "cancelled"]

    def check_group(self, group):
        attempt = self.attempts[group.prompt_id]
        assert list(group.response_ids) == attempt.generated, "a group must be the first R0 to finish generating"
        assert len(group.response_ids) == self.R0
        assert all(self.live[i].state == "scored" for i in group.response_ids)
        assert len(self.counting(group.prompt_id)) == self.R0, "surplus was neither cancelled nor used"

    def on_checkgroup(self, decision: CheckGroup):
        assert self.filtered
        self.check_group(decision.group)
        self.checks.append(decision.group)

    def on_promptfailed(self, decision: PromptFailed):
        assert self.fatal == decision.prompt_id
        self.fatal = None
        self.attempts.pop(decision.prompt_id, None)
        self.tally["failed"] += 1
        self.books.settle(decision.prompt_id, "failed")

    def on_trainbatch(self, decision: TrainBatch):
        assert self.open
        assert (decision.number, decision.kind) == (self.number, self.kind)
        assert len({group.prompt_id for group in decision.groups}) == len(decision.groups) == self.P0
        for group in decision.groups:
            self.check_group(group)
            if self.filtered:
                assert self.attempts[group.prompt_id].verdict == "kept"
            self.books.settle(group.prompt_id, "trained")
            for response_id in group.response_ids:
                self.tally["used"] += self.live.pop(response_id).tokens
                self.gone.append(response_id)
        found = Counter(self.books.offered[group.prompt_id][0] for group in decision.groups)
        if self.quotas and not self.was_exhausted:
            assert found == self.quotas
        self.batches[decision.kind] += 1
        self.tally["trained"] += len(decision.groups)
        self.open, self.settling, self.request = False, True, None

    def on_epochsettled(self, decision: EpochSettled):
        assert decision.epoch not in self.books.settled_epochs
        self.books.settled_epochs.add(decision.epoch)
        self.epoch_is_settled(decision.epoch, decision)

    def epoch_is_settled(self, epoch, told):
        assert epoch < self.books.epoch
        found = Counter(self.books.outcome.get(p) for p, (_, e) in self.books.offered.items() if e == epoch)
        # The batch that settles an epoch is counted in one decision, so the books are complete here.
        assert found == +Counter(trained=told.trained, rejected=told.rejected, failed=told.failed)

    def on_roundended(self, decision: RoundEnded):
        assert not self.live, "a round ended before every cancelled response was acknowledged"
        if self.open:  # given up: only when prompts ran out
            assert self.was_exhausted
        metrics = decision.metrics
        assert metrics.kind == self.kind
        assert metrics.prompts_trained == self.tally["trained"]
        assert metrics.prompts_admitted == self.tally["admitted"]
        assert metrics.prompts_rejected == self.tally["rejected"]
        assert metrics.prompts_failed == self.tally["failed"]
        assert metrics.responses_cancelled == self.tally["cancelled"]
        every = self.tally["used"] + self.tally["wasted"] + self.tally["rejected_tokens"]
        assert metrics.wasted_token_share == pytest.approx(self.tally["wasted"] / every if every else 0)
        assert metrics.oldest_deferral_rounds >= 0
        self.open = self.settling = False
        self.request = None

    def on_finished(self, decision: Finished):
        assert self.exhausted
        assert sorted(decision.remainder) == sorted(self.books.unsettled())
        assert len(decision.remainder) < self.P0
        self.request = None
        self.finished = True

    # Events

    def possible(self):
        """Everything that can happen to what is under way."""
        events = []
        for response_id, response in self.live.items():
            if response.state == "generating":
                events += [("generate", response_id), ("fail", response_id)]
            elif response.state == "generated":
                events += [("score", response_id), ("fail", response_id)]
            elif response.state == "cancelled":
                events += [("acknowledge", response_id), ("finish_late", response_id)]
        return events + [("judge", group) for group in self.checks]

    def act(self, event, rng, reject_share=0.3):
        self.now += rng.random()
        kind, what = event
        if kind == "judge":
            self.checks.remove(what)
            if rng.random() < reject_share:
                self.books.settle(what.prompt_id, "rejected")
                self.tally["rejected"] += 1
                for response_id in what.response_ids:
                    self.tally["rejected_tokens"] += self.live.pop(response_id).tokens
                    self.gone.append(response_id)
                del self.attempts[what.prompt_id]
                self.carry_out(self.core.group_rejected(what, self.now))
            else:
                self.attempts[what.prompt_id].verdict = "kept"
                self.carry_out(self.core.group_kept(what, self.now))
            return
        response = self.live[what]
        attempt = self.attempts.get(response.prompt)
        if kind == "generate":
            response.state, response.tokens = "generated", rng.randrange(100)
            attempt.generated.append(what)
            assert len(attempt.generated) <= self.R0, "surplus went on after R0 responses"
            self.carry_out(self.core.response_generated(what, response.tokens, self.now))
        elif kind == "score":
            response.state = "scored"
            self.carry_out(self.core.response_scored(what, self.now))
        elif kind == "finish_late":  # it had finished when the cancellation reached it
            assert self.core.response_generated(what, 7, self.now) == []
        elif kind == "acknowledge":
            self.settle_response(what, tokens := rng.randrange(100))
            end = self.core.response_aborted if rng.random() < 0.8 else self.core.response_failed
            self.carry_out(end(what, tokens, self.now))
        elif kind == "fail":
            self.settle_response(what, tokens := rng.randrange(100))
            if what in attempt.generated:
                attempt.generated.remove(what)
            self.fatal = None
            if response.retries == self.retries:
                if len(self.counting(response.prompt)) < self.R0:
                    self.fatal = response.prompt
            else:
                attempt.retries_due.append(response.retries + 1)
            self.carry_out(self.core.response_failed(what, tokens, self.now))
            assert self.fatal is None, "a prompt that failed for good was not reported"
            assert not attempt.retries_due, "a failed response was not retried"

    def settle_response(self, response_id, tokens):
        del self.live[response_id]
        self.gone.append(response_id)
        self.tally["wasted"] += tokens

    @precondition(lambda self: self.possible())
    @rule(pick=st.integers(0, 999), seed=st.integers(0, 999))
    def one_event(self, pick, seed):
        events = self.possible()
        self.act(events[pick % len(events)], random.Random(seed))

    @precondition(lambda self: self.possible())
    @rule(count=st.integers(5, 60), failures=st.sampled_from([0.0, 0.05, 0.5]), seed=st.integers(0, 2**16))
    def many_events(self, count, failures, seed):
        rng = random.Random(seed)
        for _ in range(count):
            if events := [e for e in self.possible() if e[0] != "fail" or rng.random() < failures]:
                self.act(rng.choice(events), rng)

    @precondition(lambda self: self.gone)
    @rule(pick=st.integers(0, 999))
    def late_message(self, pick):
        response_id = self.gone[pick % len(self.gone)]
        assert self.core.response_generated(response_id, 5, self.now) == []
        assert self.core.response_scored(response_id, self.now) == []
        assert self.core.response_failed(response_id, 5, self.now) == []
        assert self.core.response_aborted(response_id, 5, self.now) == []

    @precondition(lambda self: self.overtaken)
    @rule(pick=st.integers(0, 999), keep=st.booleans())
    def late_verdict(self, pick, keep):
        group = self.overtaken[pick % len(self.overtaken)]
        assert (self.core.group_kept if keep else self.core.group_rejected)(group, self.now) == []

    @precondition(lambda self: not self.open and not self.settling and not self.request)
    @rule()
    def begin(self):
        self.finished = False
        self.carry_out(self.core.begin_round(self.now))
        assert self.open or self.request or self.finished
        assert not self.open or self.to_launch == 0

    def new_prompts(self, count):
        ids = [f"{self.books.epoch}:{self.books.row + i}" for i in range(count)]
        self.books.row += count
        return ids

    @rule(few=st.integers(1, 4), all_wanted=st.booleans(), domain=st.sampled_from(["code", "math"]))
    def offer(self, few, all_wanted, domain):
        if len(self.books.unsettled()) > 40:
            return
        wanted = dict(self.request or {}) if all_wanted and self.request else {domain: few}
        for name, count in wanted.items():
            name = name or domain
            ids = self.new_prompts(count)
            self.books.offered |= dict.fromkeys(ids, (name, self.books.epoch))
            self.exhausted, self.request = False, None
            self.carry_out(self.core.offer(ids, self.now, domain=name))

    @rule()
    def exhaust(self):
        self.exhausted = self.was_exhausted = True
        self.request, self.finished = None, False
        self.carry_out(self.core.data_exhausted(self.now))

    @rule()
    def end_epoch(self):
        self.books.epoch += 1
        self.books.row = 0
        self.carry_out(self.core.end_epoch())

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
        if self.open or self.settling:
            assert self.possible() or self.request, "deadlock"

    @invariant()
    def nothing_waits_without_need(self):
        """A batch is made as soon as it can be, and rejected and failed prompts are replaced at once."""
        if self.open and not self.quotas:
            complete = [a for a in self.attempts.values() if sum(self.is_scored(i) for i in a.generated) == self.R0]
            assert len([a for a in complete if a.verdict or not self.filtered]) < self.P0
            if not self.was_exhausted and not self.request:
                assert len(self.attempts) == self.started

    def is_scored(self, response_id):
        return self.live[response_id].state == "scored"

    def teardown(self):
        """From wherever it is, training comes to an end; prompts that make up a last batch leave nothing behind."""
        self.exhaust()
        self.play_to_the_end()
        lacking = self.P0 - len(self.books.unsettled())
        assert lacking > 0
        ids = self.new_prompts(lacking)
        self.books.offered |= dict.fromkeys(ids, ("code", self.books.epoch))
        self.exhausted = False
        self.carry_out(self.core.offer(ids, self.now, domain="code"))
        self.exhaust()
        self.play_to_the_end()
        assert not self.books.unsettled(), "a prompt waits where it is never launched"
        self.end_epoch()
        assert self.books.settled_epochs == set(range(1, self.books.epoch))

    def play_to_the_end(self):
        rng = random.Random(0)
        for _ in range(20_000):
            if self.open or self.settling:
                events = [e for e in self.possible() if e[0] not in ("fail", "finish_late")]
                assert events, "deadlock"
                self.act(rng.choice(events), rng, reject_share=0.0)
            else:
                self.begin()
                if self.finished:
                    return
        raise AssertionError("training does not end")


TestTailBatching = Host.TestCase
