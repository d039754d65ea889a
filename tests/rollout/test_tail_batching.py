"""Tail batching by example: what a short, a long and a final round do, what is saved, what is refused."""

import itertools
import json

import pytest

from rl_accel.errors import ConfigError
from rl_accel.features import TailBatchingFlags
from rl_accel.rollout.tail_batching import TailBatching, TailRun
from rl_accel.rollout.tail_decisions import (
    Cancel,
    CheckGroup,
    Group,
    Launch,
    PromptFailed,
    RequestPrompts,
    RoundEnded,
    RoundStarted,
    TrainBatch,
)


class Host:
    """Carries out decisions and remembers them. Prompts are offered as they are asked for, with ids ``epoch:row``."""

    def __init__(self, P0=2, R0=2, steps=99, epoch="1", rejects=(), **flags):
        self.core = TailBatching(TailRun(P0, R0, TailBatchingFlags(**flags), filter_groups=bool(rejects)))
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
            elif isinstance(decision, CheckGroup):
                prompt = decision.group.prompt_id
                self.take(self.core.group_checked(prompt, prompt not in self.rejects, self.now))
            elif isinstance(decision, RequestPrompts):
                wanted = decision.counts.items()
                self.offer({next(self.rows) + domain: domain for domain, count in wanted for _ in range(count)})
        return decisions

    def offer(self, prompts):
        self.take(self.core.offer(prompts, self.now))

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

    def finish(self, *prompts, seconds=0.0):
        """These prompts are the first to complete; the rest is acknowledged."""
        self.complete(*prompts, seconds=seconds)
        self.acknowledge()

    def play(self, *prompts):
        self.begin().finish(*prompts)
        return self


# Short rounds


def test_a_short_round_launches_a_surplus_of_prompts_and_responses():
    host = Host(P0=4, R0=4).begin()
    assert host.one(RoundStarted) == RoundStarted(number=1, kind="short", prompts=5, responses=5)
    assert [len(launch.response_ids) for launch in host.of(Launch)] == [5] * 5
    assert host.one(RequestPrompts) == RequestPrompts({"": 5})


def test_the_first_p0_prompts_to_complete_are_the_batch_and_the_rest_is_cancelled():
    host = Host(P0=2, R0=2, prompt_ratio=1.5, response_ratio=1.0).begin()
    slow = host.responses["1:0"].copy()
    host.complete("1:2")
    assert not host.of(TrainBatch)
    host.complete("1:1")
    assert host.trained() == ["1:2", "1:1"]
    assert host.of(Cancel) == [Cancel("1:0", tuple(slow))]
    assert not host.of(RoundEnded)
    host.acknowledge()
    assert host.one(RoundEnded).metrics.prompts_deferred == 1


def test_the_first_r0_responses_count_by_generation_not_by_reward():
    host = Host(P0=1, R0=2, prompt_ratio=1.0, response_ratio=1.5).begin()
    a, b, c = host.responses["1:0"]
    host.take(host.core.response_generated(c, 5))
    host.take(host.core.response_generated(a, 9))
    assert host.one(Cancel) == Cancel("1:0", (b,))  # before any judge has answered
    host.take(host.core.response_scored(a, 1.0))
    assert not host.of(TrainBatch)
    host.take(host.core.response_scored(c, 60.0))
    assert host.one(TrainBatch).groups == (Group("1:0", (c, a)),)


def test_a_response_that_finished_just_before_its_cancellation_is_not_used():
    host = Host(P0=1, R0=1, prompt_ratio=1.0, response_ratio=2.0).begin()
    first, second = host.responses["1:0"]
    host.take(host.core.response_generated(second, 5))
    assert host.core.response_generated(first, 5) == []
    host.take(host.core.response_scored(second, 0.0))
    assert host.one(TrainBatch).groups == (Group("1:0", (second,)),)
    assert not host.of(RoundEnded), "its acknowledgement is still due"
    host.acknowledge()
    assert host.of(RoundEnded)


def test_no_round_begins_before_the_last_one_is_settled():
    host = Host(P0=1, R0=1).begin()
    with pytest.raises(ValueError, match="begin_round must come between rounds, but a round is open"):
        host.core.begin_round(9, 0.0)
    host.complete("1:0")
    with pytest.raises(ValueError, match="cancelled responses are not acknowledged"):
        host.core.begin_round(9, 0.0)
    host.acknowledge()
    with pytest.raises(ValueError, match="steps_left must be at least 1, found 0"):
        host.core.begin_round(0, 0.0)


def test_late_messages_of_an_older_round_are_ignored():
    host = Host(P0=1, R0=1, response_ratio=1.0).begin()
    (old,) = host.responses["1:1"]
    host.finish("1:0")
    host.begin()
    assert host.core.response_generated(old, 5) == []
    assert host.core.response_scored(old, 0.0) == []
    assert host.core.response_failed(old, 5, 0.0) == []
    assert host.core.response_aborted(old, 5) == []


# Long rounds


def test_a_full_queue_makes_a_long_round_without_any_surplus():
    host = Host(P0=2, R0=2, prompt_ratio=1.5)
    host.play("1:1", "1:2").play("1:4", "1:5").begin()
    assert host.one(RoundStarted) == RoundStarted(number=3, kind="long", prompts=2, responses=2)
    assert list(host.responses) == ["1:0", "1:3"]
    assert not host.of(RequestPrompts)
    host.complete("1:0", "1:3")
    assert host.one(TrainBatch).kind == "long"
    assert host.begin().one(RoundStarted).kind == "short"


def test_one_round_in_five_is_long_at_the_default_ratio():
    host = Host(P0=8, R0=1, response_ratio=1.0)
    kinds = []
    for _ in range(50):
        host.begin()
        kinds.append(host.one(RoundStarted).kind)
        host.finish(*list(host.responses)[:8])
    assert kinds.count("long") == 10


def test_a_lower_threshold_fills_the_long_round_with_new_prompts():
    host = Host(P0=3, R0=1, queue_threshold=1).play("1:0", "1:1", "1:2").begin()
    assert host.one(RoundStarted).kind == "long"
    assert list(host.responses) == ["1:3", "1:4", "1:5"]


def test_a_deferred_prompt_is_tried_again_until_max_deferrals():
    host = Host(P0=1, R0=1, prompt_ratio=2.0, max_deferrals=2)
    host.play("1:1").begin()
    assert host.one(RoundStarted).kind == "short"
    assert list(host.responses) == ["1:0", "1:2"]
    host.finish("1:2")
    assert host.begin().one(RoundStarted).kind == "long"
    assert list(host.responses) == ["1:0"]


def test_the_queue_is_not_stranded_when_there_is_no_surplus_any_more():
    host = Host(P0=4, R0=1, prompt_ratio=1.25).play("1:0", "1:1", "1:2", "1:3")
    resumed = Host(P0=4, R0=1, prompt_ratio=1.0, epoch="2")
    resumed.core.load_state_dict(host.core.state_dict())
    assert resumed.begin().one(RoundStarted).kind == "long"
    assert next(iter(resumed.responses)) == "1:4"


# Filters and failures


def test_a_rejected_group_is_replaced_at_once_and_surplus_may_finish_instead():
    host = Host(P0=2, R0=1, prompt_ratio=1.5, rejects={"1:0"}).begin()
    host.complete("1:0")
    assert host.one(CheckGroup).group.prompt_id == "1:0"
    assert host.log[-1].prompt_id == "1:3", "a new prompt takes its place"
    host.complete("1:1", "1:2")
    assert host.trained() == ["1:1", "1:2"]


def test_a_rejection_in_a_long_round_is_filled_with_a_new_prompt():
    host = Host(P0=1, R0=1, prompt_ratio=3.0, rejects={"1:1"}).play("1:0").begin()
    assert host.one(RoundStarted).kind == "long"
    host.complete("1:1")
    assert list(host.responses) == ["1:1", "1:3"], "not with 1:2, which is long"


def test_where_no_more_can_be_trained_a_deferred_prompt_takes_the_place():
    host = Host(P0=2, R0=1, prompt_ratio=2.5, rejects={"1:2"}).play("1:0", "1:1")
    host.steps_left = 1
    host.play("1:2", "1:3", "1:4")
    assert not host.of(RequestPrompts)
    assert host.trained() == ["1:3", "1:4"]


def test_a_failed_response_is_retried_then_its_prompt_is_reported_and_replaced():
    host = Host(P0=1, R0=2, prompt_ratio=1.0, response_ratio=1.0, max_retries=1).begin()
    host.take(host.core.response_failed(host.responses["1:0"][0], 3, 0.0))
    assert host.of(Launch)[-1] == Launch("1:0", (2,))
    host.take(host.core.response_failed(2, 3, 0.0))
    assert host.one(PromptFailed) == PromptFailed("1:0")
    assert host.one(Cancel) == Cancel("1:0", (1,))
    assert host.of(Launch)[-1].prompt_id == "1:1"
    host.finish("1:1")
    metrics = host.one(RoundEnded).metrics
    assert (metrics.prompts_failed, metrics.responses_failed, metrics.prompts_trained) == (1, 2, 1)


def test_a_dead_server_costs_each_of_its_responses_one_retry():
    host = Host(P0=1, R0=4, prompt_ratio=1.0, response_ratio=1.0, max_retries=1).begin()
    for response_id in range(4):
        host.take(host.core.response_failed(response_id, 0, 0.0))
    assert not host.of(PromptFailed)
    assert len(host.of(Launch)) == 1 + 4


def test_a_response_that_was_lost_with_its_server_is_made_again_without_counting():
    host = Host(P0=1, R0=1, prompt_ratio=1.0, response_ratio=1.0, max_retries=1).begin()
    for response_id in range(5):
        host.take(host.core.response_failed(response_id, 3, 0.0, lost=True))
        assert host.of(Launch)[-1] == Launch("1:0", (response_id + 1,))
    host.take(host.core.response_failed(5, 3, 0.0))
    assert not host.of(PromptFailed)
    host.take(host.core.response_failed(6, 3, 0.0))
    assert host.of(PromptFailed)


def test_a_prompt_does_not_fail_while_enough_of_its_responses_remain():
    host = Host(P0=1, R0=2, prompt_ratio=1.0, response_ratio=1.5, max_retries=0).begin()
    assert host.take(host.core.response_failed(0, 3, 0.0)) == []
    host.take(host.core.response_failed(1, 3, 0.0))
    assert host.of(PromptFailed)


def test_a_failed_judge_is_a_failed_response():
    host = Host(P0=1, R0=1, prompt_ratio=1.0, response_ratio=2.0).begin()
    host.generate("1:0", 0)
    host.take(host.core.response_failed(0, 10, 0.0))
    assert host.of(Launch)[-1] == Launch("1:0", (2,)), "the surplus was cancelled, so another is needed"


# Domains


def test_quotas_hold_in_every_round():
    host = Host(P0=3, R0=1, prompt_ratio=1.5, response_ratio=1.0, domain_quotas={"math": 2, "code": 1}).begin()
    assert host.one(RequestPrompts) == RequestPrompts({"math": 3, "code": 2})
    host.complete("1:0math", "1:1math")
    assert host.one(Cancel).prompt_id == "1:2math", "its domain has all it gives to the batch"
    host.complete("1:4code")
    assert sorted(host.trained()) == ["1:0math", "1:1math", "1:4code"]


def test_quotas_hold_in_the_last_round_and_for_what_replaces_a_rejected_prompt():
    quotas = {"math": 1, "code": 1}
    host = Host(P0=2, R0=1, steps=1, domain_quotas=quotas, response_ratio=1.0, rejects={"1:1code"}).begin()
    assert host.one(RoundStarted).kind == "final"
    host.complete("1:0math", "1:1code", "1:2code")
    assert host.trained() == ["1:0math", "1:2code"]


def test_a_domain_without_quota_is_refused():
    host = Host(P0=2, R0=1, domain_quotas={"math": 1, "code": 1})
    with pytest.raises(ValueError, match="domain of a prompt must be one of math, code, found 'logic'"):
        host.offer({"l0": "logic"})


# The end


def test_final_rounds_take_the_queue_first_and_begin_no_prompt_that_could_not_be_trained():
    host = Host(P0=2, R0=1, steps=2, prompt_ratio=1.5, response_ratio=1.0).play("1:1", "1:2").begin()
    assert host.one(RoundStarted) == RoundStarted(number=2, kind="final", prompts=2, responses=1)
    assert list(host.responses) == ["1:0", "1:3"]
    host.complete("1:0", "1:3")
    assert host.core.unsettled_prompts() == []


def test_a_run_that_turns_out_longer_than_planned_goes_on():
    host = Host(P0=2, R0=1, steps=1).play("1:0", "1:1")
    host.steps_left = 2
    host.play("1:2", "1:3")
    assert host.trained() == ["1:2", "1:3"]


# Metrics


def test_metrics_of_a_round():
    host = Host(P0=2, R0=2, prompt_ratio=1.5, response_ratio=1.5).begin()
    host.generate("1:2", 0, tokens=40)  # finished, and wasted when its prompt is cut off
    host.complete("1:0", tokens=10, seconds=3.0)
    host.complete("1:1", tokens=20, seconds=1.0)
    host.acknowledge(tokens=30)
    metrics = host.one(RoundEnded).metrics
    assert (metrics.number, metrics.kind, metrics.prompt_ratio) == (1, "short", 1.5)
    assert metrics.rollout_seconds == 4.0
    assert metrics.seconds_saved is None, "nothing is known about the tail yet"
    assert (metrics.prompts_admitted, metrics.prompts_trained, metrics.prompts_deferred) == (3, 2, 1)
    assert (metrics.queue_length, metrics.oldest_deferral_rounds) == (1, 0)
    assert metrics.responses_cancelled == 5  # two of surplus, three of the prompt that was cut off
    assert metrics.wasted_token_share == pytest.approx(150 / (150 + 60))
    assert (metrics.accepted_tokens_mean, metrics.cancelled_tokens_mean) == (15.0, 30.0)


def test_the_age_of_the_oldest_deferred_prompt_grows():
    host = Host(P0=4, R0=1)
    ages = []
    for _ in range(5):
        host.begin().finish(*list(host.responses)[:4])
        ages.append(host.one(RoundEnded).metrics.oldest_deferral_rounds)
    assert ages == [0, 1, 2, 3, 0]


def test_seconds_saved_compare_with_waiting_for_all():
    host = Host(P0=4, R0=1, response_ratio=1.0)
    saved = {"short": [], "long": []}
    for _ in range(40):
        host.begin()
        order = list(host.responses)
        seconds = 1.0 if host.one(RoundStarted).kind == "short" else 10.0
        host.complete(*order[:3])
        host.finish(order[3], seconds=seconds)
        metrics = host.one(RoundEnded).metrics
        saved[metrics.kind].append(metrics.seconds_saved)
    # Three quarters of the prompts take no time at all; a fifth of all is long and takes up to ten seconds.
    assert saved["short"][-1] > 1.0
    assert saved["long"][-1] < 0.0


# Saving


def test_a_saved_state_is_json_and_brings_back_every_prompt():
    host = Host(P0=2, R0=2, prompt_ratio=1.5).play("1:1", "1:2").begin()
    host.complete("1:4")
    saved = json.loads(json.dumps(host.core.state_dict()))
    resumed = Host(P0=2, R0=2, prompt_ratio=1.5)
    resumed.core.load_state_dict(saved)
    assert sorted(resumed.core.unsettled_prompts()) == ["1:0", "1:3", "1:4", "1:5"]
    resumed.begin()
    assert list(resumed.responses) == ["1:4", "1:3", "1:5"], "what was in flight goes first, 1:0 waits in the queue"
    assert resumed.one(RoundStarted).number == 2, "the round is done again"
    assert min(min(ids) for ids in resumed.responses.values()) > max(max(ids) for ids in host.responses.values())


def test_prompts_of_an_interrupted_long_round_wait_in_the_queue_again():
    host = Host(P0=1, R0=1, prompt_ratio=2.0).play("1:1").begin()
    assert host.one(RoundStarted).kind == "long"
    resumed = Host(P0=1, R0=1, prompt_ratio=2.0)
    resumed.core.load_state_dict(host.core.state_dict())
    assert resumed.begin().one(RoundStarted).kind == "long"
    assert list(resumed.responses) == ["1:0"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "state must have version = 2, found 1"),
        ({"format": "something"}, "state must have format = 'rl_accel.tail_batching', found 'something'"),
        ({"prompts_per_step": 3}, "state must have prompts_per_step = 2, found 3"),
        ({"responses_per_prompt": 8}, "state must have responses_per_prompt = 2, found 8"),
        ({"data_id": "other"}, "state must have data_id = '', found 'other'"),
        ({"prompts": [["1:5"]]}, "state is damaged or does not fit: TypeError"),
        ({"rounds": None}, "state is damaged or does not fit: TypeError"),
        ({"times": []}, "state is damaged or does not fit: TypeError"),
    ],
)
def test_a_state_of_another_run_is_refused_and_changes_nothing(change, message):
    host = Host().play("1:0", "1:1")
    before = host.core.state_dict()
    with pytest.raises(ValueError, match=message):
        host.core.load_state_dict({**before, **change})
    assert host.core.state_dict() == before


# Bad input


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"prompts_per_step": 0}, "prompts_per_step to be at least 1, found 0"),
        ({"responses_per_prompt": 0}, "responses_per_prompt to be at least 1, found 0"),
        ({"flags": TailBatchingFlags(domain_quotas={"math": 1})}, r"must add up to .* 2 prompts, found 1"),
    ],
)
def test_a_run_that_makes_no_sense_is_refused(run, message):
    with pytest.raises(ConfigError, match=message):
        TailRun(**{"prompts_per_step": 2, "responses_per_prompt": 2, **run})


def test_a_ratio_is_rounded_up_to_whole_prompts_but_not_for_rounding_errors():
    assert Host(P0=10, R0=1, prompt_ratio=1.1).begin().one(RoundStarted).prompts == 11
    assert Host(P0=10, R0=1, prompt_ratio=1.11).begin().one(RoundStarted).prompts == 12


def test_prompts_offered_twice_are_refused_as_a_whole():
    core = TailBatching(TailRun(2, 2))
    core.offer({"a": ""}, 0.0)
    for ids in (["b", "a"], ["b", 3]):
        with pytest.raises((ValueError, TypeError), match="ids of prompts must be"):
            core.offer(dict.fromkeys(ids, ""), 0.0)
    assert core.unsettled_prompts() == ["a"]


def test_impossible_events_are_refused():
    host = Host().begin()
    core, first = host.core, host.responses["1:0"][0]
    with pytest.raises(ValueError, match="was launched, found 99"):
        core.response_generated(99, 1)
    with pytest.raises(ValueError, match="tokens must be at least 0, found -1"):
        core.response_generated(first, -1)
    with pytest.raises(ValueError, match="still generating"):
        core.response_scored(first, 0.0)
    with pytest.raises(ValueError, match="was not cancelled"):
        core.response_aborted(first, 1)
    with pytest.raises(ValueError, match="must be of the group to check, found '1:0'"):
        core.group_checked("1:0", True, 0.0)
    core.response_generated(first, 1)
    with pytest.raises(ValueError, match="had finished"):
        core.response_generated(first, 1)
    core.response_scored(first, 0.0)
    with pytest.raises(ValueError, match="was scored before"):
        core.response_scored(first, 0.0)
    with pytest.raises(ValueError, match="was scored before"):
        core.response_failed(first, 1, 0.0)


def test_auto_starts_at_the_default_and_follows_the_observed_times():
    host = Host(P0=8, R0=1, prompt_ratio="auto", response_ratio=1.0)
    started = []
    for _ in range(12):
        host.begin()
        if host.one(RoundStarted).kind == "short":
            started.append(host.one(RoundStarted).prompts)
        host.finish(*list(host.responses)[:8], seconds=1.0)
    assert started[0] == 10
    assert started[-1] == 8, "all take the same time"


def test_auto_forgets_the_round_in_which_engines_warm_up():
    """After a start, and after a resumption."""
    cold, warm = (Host(P0=8, R0=1, prompt_ratio="auto", response_ratio=1.0) for _ in range(2))
    for first, host in ((100.0, cold), (1.0, warm)):
        for number in range(6):
            host.begin()
            host.finish(*list(host.responses)[:8], seconds=1.0 if number else first)
    times = [host.core.state_dict()["times"] for host in (cold, warm)]
    assert times[0] == times[1]
    assert times[0]["short"]
    resumed = TailBatching(cold.core.run)
    resumed.load_state_dict(cold.core.state_dict())
    again = Host(P0=8, R0=1, prompt_ratio="auto", response_ratio=1.0)
    again.core = resumed
    again.begin()
    again.finish(*list(again.responses)[:8], seconds=100.0)
    assert resumed.state_dict()["times"] == times[0]
