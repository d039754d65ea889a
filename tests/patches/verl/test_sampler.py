"""Tests the sampler patch on verl's real replay buffers, in every V1 mode."""

import itertools
import logging
import sys
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import replay_buffer

from rl_accel.errors import PatchRefused
from rl_accel.features import SamplerFlags
from rl_accel.patches.verl import sampler
from rl_accel.switch import SwitchState
from rl_accel.telemetry import metrics

(PATCH,) = sampler.SWITCHES
FATE = st.sampled_from(["teaches", "is constant", "fails"])
FATES = st.lists(FATE, max_size=20).map(lambda fates: ["teaches", *fates])
TIMES = st.lists(st.integers(1, 900), min_size=12, max_size=20, unique=True)


@pytest.fixture(autouse=True)
def untouched():
    assert PATCH.state() is SwitchState.WAITING
    metrics.drain()
    yield
    PATCH.revert()
    metrics.drain()


def buffer(kind=replay_buffer.ReplayBuffer, poll_interval=2.0):
    made = kind("sync", OmegaConf.create({}), None, "drop", OmegaConf.create({}), poll_interval=poll_interval)
    made.running_keys["train"] = {f"r{n}" for n in range(50)}
    made.finished_keys["train"] = {f"f{n}" for n in range(14)}
    return made


@pytest.mark.parametrize("kind", [replay_buffer.ReplayBuffer, replay_buffer.ReplayBufferAsync])
def test_waits_milliseconds_and_leaves_the_interval_alone_even_if_interrupted(kind, monkeypatch):
    """ReplayBuffer serves sync, ReplayBufferAsync colocate_async and separate_async, where the feature must be named."""
    PATCH.apply(SamplerFlags(enable=True))
    made = buffer(kind, poll_interval=600.0)
    start = debug = time.time()
    for _ in range(5):
        debug = made._wait_for_next_poll("train", debug)
    assert debug == start
    assert made.poll_interval == 600.0
    drained = metrics.drain()
    assert drained["rl_accel/sampler/polls"] == 5
    assert drained["rl_accel/sampler/wait_seconds"] < 600
    monkeypatch.setattr(replay_buffer.time, "sleep", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        made._wait_for_next_poll("train", debug)
    assert made.poll_interval == 600.0


def test_what_is_saved_is_the_time_to_the_wake_up_of_stock():
    PATCH.apply(SamplerFlags())
    made, debug = buffer(poll_interval=50.0), time.time()
    for _ in range(3):
        debug = made._wait_for_next_poll("train", debug)
    # Stock would be back after 50 s, we are after milliseconds; the next two polls of the same call add nothing to that.
    assert metrics.drain()["rl_accel/sampler/seconds_saved"] == pytest.approx(50, abs=5)
    made._wait_for_next_poll("train", time.time())
    assert metrics.drain()["rl_accel/sampler/seconds_saved"] == pytest.approx(50, abs=5)


def test_cost_of_the_training_between_samples_is_not_taken_for_a_poll(monkeypatch):
    PATCH.apply(SamplerFlags())
    made = buffer()
    made._wait_for_next_poll("train", time.time())
    ahead = time.perf_counter
    monkeypatch.setattr(sampler.time, "perf_counter", lambda: ahead() + 100.0)  # a step of 100 s went by
    made._wait_for_next_poll("train", time.time())
    assert metrics.drain()["rl_accel/sampler/wait_seconds"] < 2.0


def test_log_line_and_its_pace_are_verls(monkeypatch, caplog):
    monkeypatch.setattr(replay_buffer, "VERL_REPLAY_BUFFER_DEBUG_INTERVAL_SECONDS", 30)
    PATCH.apply(SamplerFlags())
    made, begun = buffer(poll_interval=0.01), time.time() - 31
    caplog.clear()
    with caplog.at_level(logging.INFO, logger=replay_buffer.logger.name):
        first = made._wait_for_next_poll("train", begun)
        second = made._wait_for_next_poll("train", first)
    assert first > begun
    assert second == first
    assert [r.message for r in caplog.records] == ["pending: 0, running: 50, finished: 14, failure: 0"]


def test_a_method_that_ignores_the_interval_is_refused(framework):
    name = framework(
        """
        import time
        class ReplayBuffer:
            def _wait_for_next_poll(self, partition_id, last_debug_time):
                time.sleep(2.0)
                return last_debug_time
        """
    )
    core = sys.modules[f"{name}.core"]
    original = core.ReplayBuffer._wait_for_next_poll
    patch = replace(PATCH, target=f"{name}.core:ReplayBuffer._wait_for_next_poll", supports=name)
    with pytest.raises(PatchRefused, match="no longer uses poll_interval"):
        patch.apply(SamplerFlags())
    assert core.ReplayBuffer._wait_for_next_poll is original


def play(kind, seconds, fates, batch_size, filtered, refills_failed):
    """Two steps on verl's own buffer. The n-th prompt that is launched takes ``seconds[n]``; its group then is as ``fates[n]``.

    Returns:
        For each step how many prompts have been launched and cleared, and which were sampled; and the seconds of all.
    """
    now, begun, cleared, story, is_sync = 0.0, {}, set(), [], kind is replay_buffer.ReplayBuffer

    def sleep(seconds):
        nonlocal now
        now += seconds
        return now

    def look_at_the_clock():
        return sleep(0.001)

    def launch(count):
        for _ in range(count):
            begun[f"p{len(begun):03d}"] = now

    def fate(uid):
        return fates[int(uid[1:]) % len(fates)]

    def look():
        states = (made.running_keys, made.finished_keys, made.failure_keys)
        for state in (*states, made.partitions, made.prompt_global_steps):
            state.clear()
        for n, (uid, start) in enumerate(begun.items()):
            if uid not in cleared:
                over = now >= start + seconds[n % len(seconds)]
                failed = refills_failed and fate(uid) == "fails"
                (states[0] if not over else states[2] if failed else states[1])["train"].add(uid)
                made.prompt_global_steps["train"][uid] = 1
                made.partitions["train"] |= {} if failed else {f"{uid}_0_0": {}}

    def clear(_partition, uids):
        cleared.update(uids)
        look()

    rules = {"train_batch_size": batch_size, "gen_batch_size": 1, "max_inflight_gen_batches": 2} if is_sync else {}
    made = kind("sync", OmegaConf.create({}), None, "drop", OmegaConf.create({}), refill_fn=launch, **rules)
    made.filter_groups_metric = "acc" if filtered else None
    made.sync_refill_failed_groups = refills_failed
    made._sync_metadata_from_transfer_queue, made._clear_groups = look, clear
    made._dapo_filtered_keys = lambda _: (
        {uid for uid in made.finished_keys["train"] if filtered and fate(uid) == "is constant"},
        Counter(),
    )
    made._materialize_batch = lambda _partition, uids, _snapshot: sorted(uids)
    clock = SimpleNamespace(sleep=sleep, time=look_at_the_clock, perf_counter=look_at_the_clock)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(replay_buffer, "time", clock)
        patched.setattr(sampler, "time", clock)
        for step in (1, 2):
            launch(batch_size if is_sync else batch_size + 2)
            batch, _ = made.sample(step, "train", batch_size)
            cleared.update(batch)
            story.append((len(begun), len(cleared), batch))
    return story, now


@given(
    seconds=TIMES.map(lambda times: [t / 100 for t in times]),
    fates=FATES,
    batch_size=st.integers(1, 9),
    rules=st.sampled_from(
        [(replay_buffer.ReplayBuffer, *flags) for flags in itertools.product((False, True), repeat=2)]
        + [(replay_buffer.ReplayBufferAsync, filtered, False) for filtered in (False, True)]
    ),
)
def test_without_being_named_it_changes_nothing_but_the_time(seconds, fates, batch_size, rules):
    kind, filtered, refills_failed = rules
    stock = play(kind, seconds, fates, batch_size, filtered, refills_failed)
    for flags in (SamplerFlags(), SamplerFlags(enable=kind is replay_buffer.ReplayBuffer)):
        PATCH.apply(flags)
        try:
            ours = play(kind, seconds, fates, batch_size, filtered, refills_failed)
        finally:
            PATCH.revert()
        assert ours[0] == stock[0]
        assert ours[1] <= stock[1] + 0.1


@pytest.mark.parametrize(
    ("poll", "pauses"), [(0.0004, [0.02] * 5), (0.2, [0.02, 2.0, 2.0, 2.0, 2.0])], ids=["cheap", "dear"]
)
def test_pauses_follow_the_seconds_of_a_poll_to_its_share_of_a_core(monkeypatch, poll, pauses):
    """As a queue with few keys, and one with very many. No pause is longer than verl's own."""
    now, slept = 0.0, []

    def sleep(seconds):
        nonlocal now
        slept.append(seconds)
        now += seconds

    for module in (replay_buffer, sampler):
        clock = SimpleNamespace(sleep=sleep, time=lambda: now, perf_counter=lambda: now)
        monkeypatch.setattr(module, "time", clock)
    PATCH.apply(SamplerFlags())
    made, debug = buffer(), now
    for _ in pauses:
        now += poll
        debug = made._wait_for_next_poll("train", debug)
    assert slept == pytest.approx(pauses)
