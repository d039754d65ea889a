"""Tests that processes agree on anchors and totals through a store, whatever is lost, sent twice or restarted."""

import json
import random
from unittest import mock

import pytest

from rl_accel.reward import adaptive_timeout
from rl_accel.reward.adaptive_timeout import AdaptiveTimeout, AnchorStore, LocalAnchors


def exchange(replica, store, everything=False):
    replica.merge(store.exchange(replica.process, replica.message(everything), everything))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "anchors.json"


def store_with_a(path=None):
    """A store that has learned an anchor, and the process that knew it."""
    store, one = AnchorStore(path), LocalAnchors()
    one.record("a", 1.0, 0.5, correct=True)
    exchange(one, store)
    return store, one


def total(store, name):
    return sum(totals.get(name, 0.0) for totals in store.totals()[0].values())


def test_what_one_learns_the_others_know_after_an_exchange():
    store, one, other = AnchorStore(), LocalAnchors(), LocalAnchors()
    for seconds in (0.2, 0.7):
        one.record("p/0", seconds, seconds / 2, correct=True)
    other.record("p/0", 0.4, 0.4, correct=True)
    other.record("p/1", 9.0, 9.0, correct=False)
    one.shapes["math"] = b"a pickle"
    one.running = 3
    for replica in (one, other, one):
        exchange(replica, store)
    assert one.timeout.get("p/0") == other.timeout.get("p/0") == (0.7, 0.4, 2)
    assert one.timeout.limit("p/0").reason == "adaptive"
    assert other.timeout.get("p/1") == (0.0, 0.0, 0)
    assert other.shapes == {"math": b"a pickle"}
    assert (one.running_elsewhere, other.running_elsewhere) == (0, 3)


def test_an_answer_holds_what_has_changed_lately_or_all(monkeypatch):
    store, one = store_with_a()
    monkeypatch.setattr(adaptive_timeout, "RECENT_ANCHORS", 0)
    assert store.exchange("other", LocalAnchors().message(False)).anchors == {}
    assert store.exchange("other", LocalAnchors().message(False), everything=True).anchors == {"a": (1.0, 0.5, 1)}
    assert one.message(everything=False).anchors == {}
    assert one.message(everything=True).anchors == {"a": (1.0, 0.5, 1)}


def test_limits_that_are_widened_are_told_once(caplog):
    one = LocalAnchors(AdaptiveTimeout(caution=0.0))
    one.record("a", 2.0, 2.0, correct=True)
    for seconds in (40.0, 400.0, 4000.0, 40_000.0):
        one.record("a", seconds, seconds, correct=True)
    assert one.totals == {"widened": 2.0}
    assert len(caplog.messages) == 1


def test_a_saved_store_goes_on(path):
    store, _ = store_with_a(path)
    store.save()
    written = path.stat().st_mtime_ns
    store.save()
    assert path.stat().st_mtime_ns == written
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    fresh = LocalAnchors()
    exchange(fresh, AnchorStore(path), everything=True)
    assert fresh.timeout.get("a") == (1.0, 0.5, 1)


ENDLESS = json.dumps(AdaptiveTimeout().state_dict() | {"anchors": {"a": [1.0, 1.0, float("inf")]}})


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "[" * 100_000, ENDLESS, json.dumps({"format": "other", "version": 1, "anchors": {}})]
)
def test_a_damaged_file_is_named_and_left_as_it_is(path, content, caplog):
    path.parent.mkdir()
    path.write_text(content)
    store, _ = store_with_a(path)
    store.save()
    assert path.read_text() == content
    (line,) = caplog.messages
    assert f"reward anchors of {path} cannot be read and are learned anew" in line


def test_a_store_saves_after_a_while_and_a_full_disk_does_not_end_it(path, monkeypatch, caplog):
    store, one = store_with_a(path)
    assert not path.exists()
    monkeypatch.setattr(adaptive_timeout, "SAVE_SECONDS", -1.0)
    exchange(one, store)
    assert "a" in path.read_text()
    monkeypatch.setattr(adaptive_timeout, "write_atomically", mock.Mock(side_effect=OSError("no space left")))
    one.record("b", 1.0, 0.5, correct=True)
    exchange(one, store)
    assert "could not be saved: no space left" in caplog.text
    assert store.totals()[1] == 2


def test_a_store_keeps_no_more_than_its_capacity():
    store, one = AnchorStore(timeout=AdaptiveTimeout(capacity=10)), LocalAnchors()
    for i in range(50):
        one.record(str(i), 1.0, 1.0, correct=True)
    exchange(one, store)
    assert store.totals()[1] == 10


@pytest.mark.parametrize("seed", range(10))
def test_all_agree_in_the_end_whatever_gets_lost_or_is_sent_twice(seed):
    dice = random.Random(seed)
    store, replicas, longest = AnchorStore(), [LocalAnchors() for _ in range(3)], {}
    executions = 0
    for _ in range(300):
        replica = dice.choice(replicas)
        if dice.random() < 0.6:
            key, seconds = dice.choice("abcde"), dice.random()
            replica.record(key, seconds, 1.0 - seconds, correct=True)
            replica.count("executions")
            wall, cpu = longest.get(key, (0.0, 0.0))
            longest[key] = max(wall, seconds), max(cpu, 1.0 - seconds)
            executions += 1
        elif dice.random() < 0.1:
            store = AnchorStore()
        elif dice.random() < 0.5:  # the answer is lost
            store.exchange(replica.process, replica.message(everything=False))
        else:
            exchange(replica, store)
    for _ in range(2):
        for replica in replicas:
            exchange(replica, store, everything=True)
    for replica in replicas:
        assert {key: anchor[:2] for key, anchor in replica.timeout.anchors().items()} == longest
    assert total(store, "executions") == executions, "each once, though messages were lost or sent twice"
