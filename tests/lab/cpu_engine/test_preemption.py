"""Compares the engine under a limit of key-value memory with the same engine without a limit, and tests which requests run."""

import random
import time

import pytest
import torch

from rl_accel.lab.cpu_engine.sampling import SamplingParams
from rl_accel.lab.cpu_engine.scheduler import HEADROOM, EngineError, Request, Scheduler

_KINDS = [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 1.3, "top_k": 10}, {"top_p": 0.8}]


def request_of(rng, **params):
    """A prompt, and parameters of a response of up to 100 tokens."""
    prompt = [rng.randrange(5, 64) for _ in range(rng.randint(1, 30))]
    return prompt, SamplingParams(max_tokens=rng.randint(1, 100), logprobs=True, **params)


def endless(seed):
    return SamplingParams(max_tokens=10_000, ignore_eos=True, logprobs=True, seed=seed)


def watch(engine):
    """Make the engine fail unless the oldest run at any step, within the budget, and a request that is preempted, of which there
    are no more than must be, comes back only after another has ended, and gets longer before it is preempted again."""
    scheduler, left = engine._scheduler, {}
    admit, make_room = scheduler.next, scheduler.preempt

    def ended():
        return sum(engine._counts[reason] for reason in ("completed", "aborted", "failed"))

    def watched_next(running):
        request = admit(running)
        if request is not None and request.preemptions:
            assert ended() > left[request.request_id][0]
        return request

    def watched_preempt(running):
        rows = make_room(running)
        out = [request for row, request in enumerate(running) if row not in rows]
        used = sum(running[row].length for row in rows)
        assert used <= scheduler.kv_tokens
        assert not out or used + min(out, key=lambda request: request.arrival).length > scheduler.kv_tokens
        for request in out:
            assert len(request.tokens) > left.get(request.request_id, (0, 0))[1]
            left[request.request_id] = ended(), len(request.tokens)
        arrivals = sorted(running[row].arrival for row in rows) + [request.arrival for request in scheduler.waiting]
        assert arrivals == sorted(arrivals)
        return rows

    scheduler.next, scheduler.preempt = watched_next, watched_preempt


def assert_same(found, expected):
    """Equal tokens; and log-probabilities as close as two orders of summation are."""
    assert (found.stop_reason, found.token_ids) == (expected.stop_reason, expected.token_ids)
    torch.testing.assert_close(torch.tensor(found.logprobs), torch.tensor(expected.logprobs), atol=2e-5, rtol=0)


@pytest.mark.slow
def test_preempted_requests_give_what_they_would_have_and_a_budget_that_suffices_changes_no_bit(model, engine_for):
    rng = random.Random(1)
    requests = [request_of(rng, seed=i, ignore_eos=True, **_KINDS[i % 4]) for i in range(32)]
    free, enough, tight = (engine_for(model, kv_tokens=budget) for budget in (None, 10_000, 130))
    watch(tight)
    expected, same, result = (
        [future.result(60) for future in [engine.submit(f"r{i}", *request) for i, request in enumerate(requests)]]
        for engine in (free, enough, tight)
    )
    assert same == expected
    for one, other in zip(result, expected, strict=True):
        assert_same(one, other)
    assert {i % 4 for i, generation in enumerate(result) if generation.preemptions} == {0, 1, 2, 3}, "of every kind"
    stats = tight.stats().result(10)
    assert stats.preemptions == sum(generation.preemptions for generation in result) >= 5
    assert stats.prefills == len(requests) + stats.preemptions
    assert stats.tokens == sum(len(generation.token_ids) for generation in result)
    assert free.stats().result(10).preemptions == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 12))])
def test_whatever_arrives_and_is_aborted_the_rest_is_as_without_a_budget(model, engine_for, seed):
    rng = random.Random(seed)
    budget = rng.randint(140, 260)
    engines = engine_for(model), engine_for(model, kv_tokens=budget)
    watch(engines[1])
    requests = [request_of(rng, ignore_eos=rng.random() < 0.7, **rng.choice(_KINDS)) for _ in range(40)]
    submitted = [engines[0].submit(f"r{i}", *request) for i, request in enumerate(requests)]
    expected = [future.result(60) for future in submitted]
    futures, ways_out = [], set()
    for i, request in enumerate(requests):
        futures.append(engines[1].submit(f"r{i}", *request))
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.02)
        if rng.random() < 0.25:
            chosen = rng.randrange(i + 1)
            if rng.random() < 0.5:
                engines[1].abort(f"r{chosen}")
                ways_out.add((chosen, "aborted"))
            elif futures[chosen].cancel():
                ways_out.add((chosen, "cancelled"))
    for i, (future, whole) in enumerate(zip(futures, expected, strict=True)):
        if future.cancelled():
            assert (i, "cancelled") in ways_out
            continue
        result = future.result(60)
        if result.stop_reason == "aborted":
            assert (i, "aborted") in ways_out
            assert result.token_ids == whole.token_ids[: len(result.token_ids)]
            assert len(result.logprobs) == len(result.token_ids)
        else:
            assert_same(result, whole)
    stats = engines[1].stats().result(10)
    assert stats.preemptions > 0
    assert (stats.running, stats.waiting, stats.failed) == (0, 0, 0)


def test_a_request_joins_others_only_with_some_room_to_grow_and_none_overtakes():
    def request(name, prompt, tokens=()):
        return Request(name, [5] * prompt, SamplingParams(max_tokens=100), seed=0, tokens=list(tokens))

    scheduler = Scheduler(8, kv_tokens=100)
    old, most = request("old", 20, [7] * 5), 100 - 25 - 2 * HEADROOM
    scheduler.add(request("wide", most + 1))
    scheduler.add(request("narrow", 1))
    assert scheduler.next([old]) is None
    assert scheduler.next([]).request_id == "wide"
    scheduler.drop(list(scheduler.waiting))
    scheduler.add(request("fits", most))
    assert scheduler.next([old]).request_id == "fits"
    for budget in (0, 1, -5, 10.0, True, "100"):
        with pytest.raises(ValueError, match="kv_tokens wants an integer of at least 2, or None"):
            Scheduler(8, kv_tokens=budget)


@pytest.mark.slow
def test_a_request_that_alone_exceeds_the_budget_is_refused_when_it_is_made(model, engine_for):
    engine = engine_for(model, kv_tokens=100)
    with pytest.raises(ValueError, match=r"request r: a prompt of 60 tokens .* up to 41 do not fit into kv_tokens=100"):
        engine.submit("r", [5] * 60, SamplingParams(max_tokens=41))
    fits = engine.submit("r", [5] * 60, SamplingParams(max_tokens=40, ignore_eos=True))
    assert len(fits.result(30).token_ids) == 40
    # A response ends at max_model_len too, whatever was asked for.
    capped = engine_for(model, kv_tokens=100, max_model_len=100).submit("r", [5] * 60, endless(0))
    assert len(capped.result(30).token_ids) == 40


@pytest.fixture
def away(engine_for, wait_for):
    """``away(model, 60, 60)`` sends endless requests with prompts so long; all but the oldest have just been preempted."""

    def start(model, *prompts):
        engine = engine_for(model, kv_tokens=200, max_model_len=200, seconds_per_step=0.02)
        futures = [engine.submit(f"r{seed}", [5] * length, endless(seed)) for seed, length in enumerate(prompts)]
        younger = len(prompts) - 1
        wait_for(lambda: engine.stats().result(10).preemptions == younger, "preemptions")
        stats = engine.stats().result(10)
        assert (stats.running, stats.waiting) == (1, younger)
        return engine, futures

    return start


@pytest.mark.slow
def test_a_request_that_is_away_can_be_aborted_cancelled_or_fail_alone(model, engine_for, away, wait_for, monkeypatch):
    whole = engine_for(model, max_model_len=200).submit("r", [5] * 40, endless(2)).result(30)
    engine, (old, failing, aborted, cancelled) = away(model, 40, 40, 40, 40)
    assert engine.abort("r2").result(10) == 1
    result = aborted.result(10)
    assert (result.stop_reason, result.preemptions) == ("aborted", 1)
    assert 20 < len(result.token_ids) < 32, "what it has"
    assert result.token_ids == whole.token_ids[: len(result.token_ids)]

    assert cancelled.cancel()
    wait_for(lambda: engine.stats().result(10).waiting == 1, "the cancelled request to be forgotten")
    read = engine._batch.read
    monkeypatch.setattr(engine._batch, "read", lambda tokens: 1 / 0 if len(tokens) > 40 else read(tokens))
    assert old.result(30).stop_reason == "completed"
    with pytest.raises(ZeroDivisionError):
        failing.result(30)
    assert engine.stats().result(10).preemptions == 3
    assert engine.submit("later", [6] * 40, SamplingParams(max_tokens=5)).result(30).stop_reason == "completed"


@pytest.mark.slow
def test_weights_are_refused_as_long_as_a_request_is_away_which_pause_ends(make_model, away):
    old_model, new_model = make_model(seed=0), make_model(seed=1)
    engine, (old, young) = away(old_model, 60, 60)
    weights = {name: tensor.clone() for name, tensor in new_model.named_parameters()}
    with pytest.raises(EngineError, match="2 requests are decoding"):
        engine.load_weights(weights).result(10)
    # Between two steps, with nothing running but the one that is away: it would go on under other weights.
    engine.abort("r0")
    refused = engine.load_weights(weights)
    assert old.result(10).stop_reason == "aborted"
    with pytest.raises(EngineError, match="1 requests are decoding"):
        refused.result(10)
    assert engine.pause().result(10) == 1
    engine.load_weights(weights).result(10)
    assert young.result(10).stop_reason == "aborted"
