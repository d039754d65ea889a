import json
import random
from unittest import mock

import pytest

from rl_accel.reward import anchor_store
from rl_accel.reward.adaptive_timeout import AdaptiveTimeout
from rl_accel.reward.anchor_store import AnchorStore, LocalAnchors


def exchange(replica, store):
    replica.apply(store.exchange(replica.take_delta()))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "anchors.json"


def store_with_a(path=None):
    """A store that has learned an anchor, and the process that knew it."""
    store, one = AnchorStore(path), LocalAnchors()
    one.record("a", 1.0, 0.5, correct=True)
    exchange(one, store)
    return store, one


def test_what_one_learns_the_others_know_after_an_exchange():
    store, one, other = AnchorStore(), LocalAnchors(), LocalAnchors()
    for seconds in (0.2, 0.7):
        one.record("p/0", seconds, seconds / 2, correct=True)
    other.record("p/0", 0.4, 0.4, correct=True)
    other.record("p/1", 9.0, 9.0, correct=False)
    for replica in (one, other, one):
        exchange(replica, store)
    assert one.timeout.get("p/0") == other.timeout.get("p/0") == (0.7, 0.4, 3)
    assert one.timeout.limit("p/0").reason == "adaptive"
    assert other.timeout.get("p/1") == (0.0, 0.0, 0)


def test_limits_that_one_suspends_are_suspended_for_all_and_learned_again(caplog):
    store, one, other = AnchorStore(), LocalAnchors(), LocalAnchors()
    for key in "abcd":
        one.record(key, 2.0, 2.0, correct=True)
    for replica in (one, other):
        exchange(replica, store)
    assert other.timeout.limit("d").reason == "adaptive"
    for key in "abc":
        one.record(key, 40.0, 40.0, correct=True)  # a slow day
    other.record("d", 2.0, 2.0, correct=True)  # what it learned before it knew is no use
    for replica in (one, other, one, other):
        exchange(replica, store)
    assert [replica.timeout.limit("d").reason for replica in (one, other)] == ["learning"] * 2
    assert [replica.timeout.get("c") for replica in (one, other)] == [(40.0, 40.0, 1)] * 2
    assert store.take_counts() == (store.incarnation, {"suspended": 1.0, "anchors": 4.0})
    assert len(caplog.messages) == 1


def test_an_update_holds_only_what_has_changed():
    (store, one), other = store_with_a(), LocalAnchors()
    assert store.exchange(one.take_delta()).anchors == {}
    other.record("b", 2.0, 2.0, correct=True)
    exchange(other, store)
    assert store.exchange(one.take_delta()).anchors == {"b": (2.0, 2.0, 1)}


def test_a_saved_store_goes_on(path):
    store, _ = store_with_a(path)
    store.save()
    written = path.stat().st_mtime_ns
    store.save()
    assert path.stat().st_mtime_ns == written
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    fresh = LocalAnchors()
    exchange(fresh, AnchorStore(path))
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
    monkeypatch.setattr(anchor_store, "SAVE_SECONDS", -1.0)
    exchange(one, store)
    assert "a" in path.read_text()
    monkeypatch.setattr(anchor_store, "write_atomically", mock.Mock(side_effect=OSError("no space left")))
    one.record("b", 1.0, 0.5, correct=True)
    exchange(one, store)
    assert "could not be saved: no space left" in caplog.text
    assert store.take_counts()[1]["anchors"] == 2.0


def test_a_store_keeps_no_more_than_its_capacity():
    store, one = AnchorStore(timeout=AdaptiveTimeout(capacity=10)), LocalAnchors()
    for i in range(50):
        one.record(str(i), 1.0, 1.0, correct=True)
    exchange(one, store)
    assert len(store) == 10
    assert len(store.exchange(LocalAnchors().take_delta()).anchors) == 10


@pytest.mark.parametrize("seed", range(10))
def test_all_agree_in_the_end_whatever_gets_lost(seed):
    dice = random.Random(seed)
    store, replicas, longest = AnchorStore(), [LocalAnchors() for _ in range(3)], {}
    executions, counted = 0, []
    for _ in range(300):
        replica = dice.choice(replicas)
        if dice.random() < 0.6:
            key, seconds = dice.choice("abcde"), dice.random()
            replica.record(key, seconds, 1.0 - seconds, correct=True)
            replica.count("executions")
            wall, cpu = longest.get(key, (0.0, 0.0))
            longest[key] = max(wall, seconds), max(cpu, 1.0 - seconds)
            executions += 1
        elif dice.random() < 0.3:
            replica.put_back(replica.take_delta())
        elif dice.random() < 0.1:
            counted.append(store.take_counts()[1])
            store = AnchorStore()
        else:
            exchange(replica, store)
    for _ in range(3):
        for replica in replicas:
            exchange(replica, store)
    for replica in replicas:
        assert {key: anchor[:2] for key, anchor in replica.timeout.anchors().items()} == longest
    counted += [store.take_counts()[1], store.take_counts()[1]]
    assert sum(counts.get("executions", 0) for counts in counted) == executions, "each once, though exchanges failed"
