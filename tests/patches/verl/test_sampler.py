"""The sampler patch on verl's real replay buffers: same method, other interval, one attribute for every V1 mode."""

import json
import logging
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rl_accel.errors import PatchRefused
from rl_accel.features import SamplerFlags
from rl_accel.patches.verl import sampler
from rl_accel.switch import SwitchState
from rl_accel.telemetry import metrics

replay_buffer = pytest.importorskip("verl.trainer.ppo.v1.replay_buffer")
(PATCH,) = sampler.SWITCHES


@pytest.fixture(autouse=True)
def untouched():
    assert PATCH.state() is SwitchState.PENDING
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
    """ReplayBuffer serves sync, ReplayBufferAsync colocate_async and separate_async."""
    PATCH.apply(SamplerFlags())
    made = buffer(kind, poll_interval=600.0)
    start = debug = time.time()
    for _ in range(5):
        debug = made._wait_for_next_poll("train", debug)
    assert debug == start
    assert made.poll_interval == 600.0
    found = metrics.drain()
    assert found["rl_accel/sampler/polls"] == 5
    assert found["rl_accel/sampler/wait_s"] < 600

    def interrupt(_seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(replay_buffer.time, "sleep", interrupt)
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
    assert metrics.drain()["rl_accel/sampler/wait_s"] < 2.0


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
    with pytest.raises(PatchRefused, match="no longer reads"):
        patch.apply(SamplerFlags())
    assert core.ReplayBuffer._wait_for_next_poll is original


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "seconds"), [(2000, 6), pytest.param(20_000, 30, marks=pytest.mark.full)])
def test_a_real_queue_costs_little_delay_and_at_most_5_percent_of_a_core(short_tmp, python, keys, seconds):
    """What ``sample_from_queue.py`` measures, with ``keys`` keys for ``seconds``, then with a small store.

    The CPU time is that of the sampling process and of the queue's controller, less what both take when nobody polls. Two polls
    more are allowed: the first one, which no pause precedes, and one for the measurement.
    """
    script = Path(__file__).with_name("sample_from_queue.py").read_text()
    done = python(script, str(short_tmp), str(keys), str(seconds), timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    measured = json.loads(done.stdout.splitlines()[-1])
    small, large = measured["small"], measured["large"]
    assert len(small["pauses"]) > 50
    assert statistics.median(small["pauses"]) <= 0.02
    assert small["seconds_saved"] > 0
    assert large["polls"] >= 3
    assert large["cpu_share"] - measured["idle"] <= 0.05 + 2 * large["poll_s"] / seconds
