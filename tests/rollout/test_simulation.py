"""Compares simulated rollouts, which use the state machines of production, with sums done by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_accel.features import TailBatchingFlags
from rl_accel.rollout.simulation import Cluster, EngineModel, play_rounds
from rl_accel.rollout.tail_batching import TailRun
from rl_accel.rollout.workload import Lengths, from_groups

PLAIN = TailBatchingFlags(prompt_ratio=1.0, response_ratio=1.0)
PACE = 0.01
LENGTHS = st.lists(st.lists(st.integers(1, 400), min_size=3, max_size=3), min_size=8, max_size=40)


def drawn(*rewards):
    """Lengths by chance; with rewards of so many seconds, if any."""
    tokens = np.sort(np.random.default_rng(0).lognormal(4, 1, 1000)).astype(int) + 1
    return Lengths(tokens, 0.3, prompt_tokens=10, rewards=np.array(rewards))


def replayed(table, prompt_tokens=0):
    """The lengths of a table, [P, R]."""
    return from_groups(table, "", prompt_tokens=prompt_tokens)


def ends_of(cluster, lengths):
    """Times at which requests of these lengths end."""
    cluster.launch(range(len(lengths)), lengths)
    ends = []
    while len(cluster):
        if cluster.happen():
            ends.append(cluster.now)
    return ends


def seconds_of(rounds):
    return [played.metrics.rollout_seconds for played in rounds]


@given(table=LENGTHS, replicas=st.integers(1, 5))
def test_without_a_feature_rollouts_take_exactly_the_longest_of_each(table, replicas):
    steps = len(table) // 4
    played = play_rounds(TailRun(4, 3, PLAIN), EngineModel({1: PACE}), replicas, replayed(table), steps)
    longest = [PACE * max(max(row) for row in table[4 * step : 4 * step + 4]) for step in range(steps)]
    assert seconds_of(played) == pytest.approx(longest)
    assert sum(played_round.metrics.tokens_wasted for played_round in played) == 0
    assert sum(p.metrics.tokens_generated for p in played) == sum(sum(row) for row in table[: 4 * steps])


@given(seed=st.integers(0, 2**31), ratio=st.sampled_from([1.0, 1.25, 2.0]), replicas=st.integers(1, 4))
def test_the_same_seed_gives_the_same_rounds(seed, ratio, replicas):
    run = TailRun(4, 3, TailBatchingFlags(prompt_ratio=ratio))
    engine = EngineModel({1: PACE, 32: 2 * PACE}, 1e-7, 1e-5, slots=6, cache_tokens=2000)
    first, second = (play_rounds(run, engine, replicas, drawn(0.1, 5.0), 12, seed) for _ in range(2))
    assert first == second


@given(
    seed=st.integers(0, 1000),
    slots=st.integers(1, 64),
    cache=st.integers(500, 20_000),
    response_ratio=st.sampled_from([1.0, 1.25, 2.0]),
)
def test_rounds_always_end_with_whole_batches(seed, slots, cache, response_ratio):
    run = TailRun(4, 3, TailBatchingFlags(response_ratio=response_ratio))
    engine = EngineModel({1: PACE, 64: 3 * PACE}, 1e-7, 1e-5, slots=slots, cache_tokens=cache)
    played = play_rounds(run, engine, 2, drawn(0.0, 0.5, 40.0), 15, seed)
    assert all(p.metrics.prompts_trained == 4 for p in played)
    assert all(0 <= p.metrics.tokens_wasted < p.metrics.tokens_generated for p in played)
    assert {"short", "long"} <= {p.metrics.kind for p in played}


@pytest.mark.parametrize(
    ("engine", "lengths", "ends"),
    [
        # three run for 10 steps, two for 10 more, one for 10
        (EngineModel({1: 0.01, 3: 0.02}), [10, 20, 30], [0.2, 0.35, 0.45]),
        (EngineModel({1: 0.01}, slots=1), [10, 20, 30], [0.1, 0.3, 0.6]),
    ],
    ids=["a step takes what is said for the requests that run", "what has no place waits"],
)
def test_ends_of_three_responses(engine, lengths, ends):
    assert ends_of(Cluster(engine, 1), lengths) == pytest.approx(ends)
    (played,) = play_rounds(TailRun(1, 3, PLAIN), engine, 1, replayed([lengths]), 1)
    assert played.metrics.rollout_seconds == pytest.approx(max(ends))


def test_cached_tokens_slow_a_step_down_and_a_full_cache_preempts_the_request_that_began_last():
    workload = replayed([[100]], prompt_tokens=50)
    (played,) = play_rounds(TailRun(1, 1, PLAIN), EngineModel({1: 0.01}, 1e-4), 1, workload, 1)
    assert played.metrics.rollout_seconds == pytest.approx(100 * 0.01 + 1e-4 * (100 * 50 + 100 * 100 / 2))
    engine = EngineModel({1: 0.01}, prompt_token_seconds=0.001, cache_tokens=100)
    (played,) = play_rounds(TailRun(1, 2, PLAIN), engine, 1, replayed([[80, 80]], prompt_tokens=10), 1)
    # Both read 10 tokens of a prompt and go on for 40; the second one waits 40 steps, is read again and does its last 40.
    assert played.preemptions == 1
    assert ends_of(Cluster(engine, 1, 10), [80, 80]) == pytest.approx([0.02 + 0.8, 0.02 + 0.8 + 0.05 + 0.4])


def test_rewards_end_a_rollout():
    run, engine, workload = TailRun(4, 3, PLAIN), EngineModel({1: 0.001}), drawn(*[0.1] * 19, 25.0)
    waiting = seconds_of(play_rounds(run, engine, 1, workload, 20))
    assert max(waiting) > 25


def test_the_replica_with_the_fewest_gets_a_request_and_what_is_cancelled_says_how_far_it_was():
    cluster = Cluster(EngineModel({1: 1.0, 2: 2.0}), 2)
    cluster.launch([1, 2, 3], [10, 10, 40])  # 1 and 3 share a replica
    assert [(cluster.happen().id, cluster.now) for _ in range(2)] == [(2, 10.0), (1, 20.0)]
    assert cluster.cancel([3]) == [10]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: EngineModel({}), "step_seconds must be finite times above 0"),
        (lambda: EngineModel({1: 0.0}), "step_seconds must be finite times above 0"),
        (lambda: EngineModel({1: 0.1, 2: np.inf}), "step_seconds must be finite times above 0"),
        (lambda: EngineModel({0: 0.1}), "by numbers of running requests from 1, found {0: 0.1}"),
        (lambda: EngineModel({1: 1.0}, slots=0), "slots must be at least 1, found 0"),
        (lambda: EngineModel({1: 1.0}, cached_token_seconds=-1.0), "cached_token_seconds must be at least 0"),
        (lambda: Cluster(EngineModel({1: 1.0}), 0), "replicas must be at least 1"),
    ],
)
def test_impossible_sizes_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        wrong()
