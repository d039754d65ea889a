"""Tests tail batching by examples: short, long and final rounds, saved state, and refused calls."""

import itertools

import pytest

from rl_accel.errors import ConfigError
from rl_accel.features import TailBatchingFlags
from rl_accel.rollout import tail_decisions
from rl_accel.rollout.tail_batching import TailBatching, TailRun
from rl_accel.rollout.tail_decisions import Cancel, Launch, RequestPrompts, RoundEnded, RoundStarted, TrainBatch


class Host:
    """Carries out decisions and remembers them. Prompts are offered as they are asked for, with ids ``epoch:row``."""

    def __init__(self, P0=2, R0=2, steps=99, epoch="1", rejects=(), resumes=None, **flags):
        self.core = TailBatching(TailRun(P0, R0, TailBatchingFlags(**flags), filter_groups=bool(rejects)))
        if resumes:
            self.core.load_state_dict(resumes.core.state_dict())
        self.rejects = rejects
        self.rows = (f"{epoch}:{row}" for row in itertools.count())
        self.steps_left = steps
        self.now = 0.0
        self.log, self.responses, self.cancelled = [], {}, []

    def take(self, decisions):
        for decision in decisions:
            self.log.append(decision)
            if isinstance(decision, Launch):
                self.responses.setdefault(decision.prompt_id, []).extend(decision.response_ids)
            elif isinstance(decision, Cancel):
                self.cancelled += decision.response_ids
                for response_id in decision.response_ids:
                    self.responses[decision.prompt_id].remove(response_id)
            elif isinstance(decision, tail_decisions.CheckGroup):
                prompt = decision.group.prompt_id
                self.take(self.core.group_checked(prompt, prompt not in self.rejects, self.now))
            elif isinstance(decision, RequestPrompts):
                self.take(self.core.offer(list(itertools.islice(self.rows, decision.count)), self.now))
        return decisions

    def begin(self):
        self.log, self.responses, self.cancelled = [], {}, []
        self.take(self.core.begin_round(self.steps_left, self.now))
        self.steps_left -= 1
        return self

    def generate(self, prompt, *responses, tokens=10):
        for n in responses:
            self.take(self.core.response_generated(self.responses[prompt][n], tokens))

    def complete(self, *prompts, tokens=10, seconds=0.0):
        """The first R0 responses of each prompt finish and are scored."""
        self.now += seconds
        for prompt in prompts:
            first = self.responses[prompt][: self.core.run.responses_per_prompt]
            for response_id in first:
                self.take(self.core.response_generated(response_id, tokens))
            for response_id in first:
                self.take(self.core.response_scored(response_id, self.now))

    def acknowledge(self, tokens=10):
        while self.cancelled:
            self.take(self.core.response_aborted(self.cancelled.pop(), tokens))

    def of(self, kind):
        return [decision for decision in self.log if isinstance(decision, kind)]

    def one(self, kind):
        (decision,) = self.of(kind)
        return decision

    def trained(self):
        return [group.prompt_id for group in self.one(TrainBatch).groups]

    def play(self, *prompts, seconds=0.0):
        """A round in which these prompts, or the first P0 of all, complete first; the rest is acknowledged."""
        self.begin()
        self.complete(*prompts or [*self.responses][: self.core.run.prompts_per_step], seconds=seconds)
        self.acknowledge()
        return self


def test_a_short_round_launches_a_surplus_of_prompts_and_responses():
    host = Host(P0=4, R0=4).begin()
    assert host.one(RoundStarted) == RoundStarted(number=1, kind="short", prompts=5, responses=5)
    assert [len(launch.response_ids) for launch in host.of(Launch)] == [5] * 5
    assert host.one(RequestPrompts) == RequestPrompts(5)
    for ratio, prompts in ((1.1, 11), (1.11, 12)):  # rounded up, but not for a rounding error
        assert Host(P0=10, R0=1, prompt_ratio=ratio).begin().one(RoundStarted).prompts == prompts


def test_a_round_during_a_validation_is_long_with_what_the_queue_has():
    host = Host(P0=2, prompt_ratio=1.5).play("1:1", "1:2")  # defers 1:0
    host.log.clear()
    host.take(host.core.begin_round(host.steps_left, host.now, during_validation=True))
    assert host.one(RoundStarted) == RoundStarted(number=2, kind="long", prompts=2, responses=2)
    assert [launch.prompt_id for launch in host.of(Launch)] == ["1:0", "1:3"]


@pytest.mark.parametrize(
    ("settings", "played", "kind", "launched", "requested"),
    [
        ({"P0": 2, "prompt_ratio": 1.5}, [["1:1", "1:2"], ["1:4", "1:5"]], "long", ["1:0", "1:3"], 0),
        ({"P0": 3, "queue_threshold": 1}, [["1:0", "1:1", "1:2"]], "long", ["1:3", "1:4", "1:5"], 2),
        ({"P0": 1, "prompt_ratio": 2.0, "max_deferrals": 2}, [["1:1"]], "short", ["1:0", "1:2"], 1),
        ({"P0": 1, "prompt_ratio": 2.0, "max_deferrals": 2}, [["1:1"], ["1:2"]], "long", ["1:0"], 0),
        ({"P0": 2, "prompt_ratio": 1.5, "steps": 2}, [["1:1", "1:2"]], "final", ["1:0", "1:3"], 1),
    ],
    ids=["full queue", "lower threshold", "deferred once", "deferred often enough", "no step for more prompts"],
)
def test_kind_and_prompts_of_a_round_and_of_the_same_after_an_interruption(settings, played, kind, launched, requested):
    host = Host(**settings)
    for prompts in played:
        host.play(*prompts)
    host.begin()
    resumed = Host(resumes=host, **settings)
    resumed.steps_left = host.steps_left + 1
    for run in (host, resumed.begin()):
        prompts, responses = len(launched), 3 if kind == "short" else 2
        assert run.one(RoundStarted) == RoundStarted(len(played) + 1, kind, prompts=prompts, responses=responses)
        assert list(run.responses) == launched
    assert sum(request.count for request in host.of(RequestPrompts)) == requested


def test_one_round_in_five_is_long_at_the_default_ratio_and_its_prompts_are_the_oldest():
    host = Host(P0=4, R0=1)
    rounds = [host.play().one(RoundEnded).metrics for _ in range(50)]
    assert [metrics.kind for metrics in rounds] == ["short", "short", "short", "short", "long"] * 10
    assert [metrics.oldest_deferral_rounds for metrics in rounds] == [0, 1, 2, 3, 0] * 10


def test_the_queue_is_not_stranded_when_there_is_no_surplus_any_more():
    host = Host(P0=4, R0=1, prompt_ratio=1.25).play("1:0", "1:1", "1:2", "1:3")
    resumed = Host(P0=4, R0=1, prompt_ratio=1.0, epoch="2", resumes=host)
    assert resumed.begin().one(RoundStarted).kind == "long"
    assert next(iter(resumed.responses)) == "1:4"


def test_a_rejection_in_a_long_round_is_filled_with_a_new_prompt():
    host = Host(P0=1, R0=1, prompt_ratio=3.0, rejects={"1:1"}).play("1:0").begin()
    assert host.one(RoundStarted).kind == "long"
    host.complete("1:1")
    assert list(host.responses) == ["1:1", "1:3"], "not with 1:2, which is long"


def test_batch_and_metrics_of_a_round_that_cuts_off_a_prompt():
    host = Host(P0=2, R0=2, prompt_ratio=1.5, response_ratio=1.5).begin()
    slow = host.responses["1:2"].copy()
    host.generate("1:2", 0, tokens=40)  # finished, and wasted when its prompt is cut off
    host.complete("1:1", tokens=10, seconds=3.0)
    assert not host.of(TrainBatch)
    host.complete("1:0", tokens=20, seconds=1.0)
    assert host.trained() == ["1:1", "1:0"]
    cancel = host.of(Cancel)[-1]
    assert (cancel.prompt_id, sorted(cancel.response_ids)) == ("1:2", slow)
    host.acknowledge(tokens=30)
    metrics = host.one(RoundEnded).metrics
    assert (metrics.number, metrics.kind, metrics.prompt_ratio, metrics.rollout_seconds) == (1, "short", 1.5, 4.0)
    assert (metrics.prompts_admitted, metrics.prompts_trained, metrics.prompts_deferred) == (3, 2, 1)
    assert (metrics.queue_length, metrics.oldest_deferral_rounds) == (1, 0)
    assert metrics.responses_cancelled == 5  # two of surplus, three of the prompt that was cut off
    assert metrics.wasted_token_share == pytest.approx(150 / (150 + 60))
    assert (metrics.accepted_tokens_mean, metrics.cancelled_tokens_mean) == (15.0, 30.0)


def test_what_was_in_flight_at_an_interruption_goes_first_the_furthest_before_the_rest():
    host = Host(P0=2, R0=2, prompt_ratio=1.5).play("1:1", "1:2").begin()
    host.complete("1:4")
    resumed = Host(P0=2, R0=2, prompt_ratio=1.5, resumes=host).begin()
    assert list(resumed.responses) == ["1:4", "1:3", "1:5"], "1:0 waits in the queue"


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"prompts_per_step": 0}, "prompts_per_step to be at least 1, found 0"),
        ({"responses_per_prompt": 0}, "responses_per_prompt to be at least 1, found 0"),
    ],
)
def test_a_run_that_makes_no_sense_is_refused(run, message):
    with pytest.raises(ConfigError, match=message):
        TailRun(**{"prompts_per_step": 2, "responses_per_prompt": 2, **run})


def test_prompts_offered_twice_are_refused_as_a_whole():
    core = TailBatching(TailRun(2, 2))
    core.offer(["a"], 0.0)
    for ids in (["b", "a"], ["b", "b"], ["b", 3]):
        with pytest.raises((ValueError, TypeError), match="ids of prompts must be"):
            core.offer(ids, 0.0)
    assert core.unsettled_prompts() == ["a"]


def test_impossible_calls_are_refused():
    host = Host(P0=1, R0=2).begin()
    core, (first, second, _) = host.core, host.responses["1:0"]

    def refuses(message, call, *arguments):
        with pytest.raises(ValueError, match=message):
            call(*arguments)

    refuses("begin_round must come between rounds, but a round is open", core.begin_round, 9, 0.0)
    refuses("was launched, found 99", core.response_generated, 99, 1)
    refuses("tokens must be at least 0, found -1", core.response_generated, first, -1)
    refuses("still generating", core.response_scored, first, 0.0)
    refuses("was not cancelled", core.response_aborted, first, 1)
    refuses("must be of the group to check, found '1:0'", core.group_checked, "1:0", True, 0.0)
    core.response_generated(first, 1)
    refuses("had finished", core.response_generated, first, 1)
    core.response_scored(first, 0.0)
    refuses("was scored before", core.response_scored, first, 0.0)
    refuses("was scored before", core.response_failed, first, 1, 0.0)
    host.take(core.response_generated(second, 1))
    host.take(core.response_scored(second, 0.0))
    refuses("cancelled responses are not acknowledged", core.begin_round, 9, 0.0)
    host.acknowledge()
    refuses("steps_left must be at least 1, found 0", core.begin_round, 0, 0.0)
