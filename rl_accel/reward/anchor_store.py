"""Anchors shared by many processes: each process reads and updates its own replica, which exchanges changes with one store.

Nothing here waits for another process. A replica that cannot reach the store continues with its own anchors. A restarted store
receives all anchors from every replica.
"""

import json
import logging
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rl_accel.files import write_atomically
from rl_accel.reward.adaptive_timeout import AdaptiveTimeout, AnchorTuple, longest

logger = logging.getLogger("rl_accel")


@dataclass
class AnchorDelta:
    """Changes that a replica sends to the store.

    Attributes:
        incarnation: id of the store in the last exchange; "" before the first.
        version: version of the store in the last exchange.
        learned: by key, anchor and number of correct results since the last exchange.
        everything: all anchors of the replica if the store has restarted, else empty.
        counts: counts since the last exchange, by name.
        era: the replica's era, see :meth:`AdaptiveTimeout.suspend`; the store ignores anchors of an earlier era.
    """

    incarnation: str = ""
    version: int = 0
    learned: dict[str, AnchorTuple] = field(default_factory=dict)
    everything: dict[str, AnchorTuple] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    era: int = 0


@dataclass
class Update:
    """Answer of the store: incarnation, version and era of the store, and the anchors changed since the delta's version."""

    incarnation: str
    version: int
    anchors: dict[str, AnchorTuple]
    era: int = 0


class Replica:
    """A process's own :class:`AdaptiveTimeout`, and the changes that the store does not have yet."""

    def __init__(self, timeout: AdaptiveTimeout | None = None) -> None:
        self.timeout = AdaptiveTimeout() if timeout is None else timeout
        self._learned: dict[str, AnchorTuple] = {}
        self._counts: dict[str, float] = {}
        self._incarnation, self._version, self._tell_everything = "", 0, False

    def record(self, key: str, wall: float, cpu: float, correct: bool, stopped: bool = False) -> None:
        """Records an execution; see :meth:`AdaptiveTimeout.record`."""
        if self.timeout.record(key, wall, cpu, correct, stopped):
            self._learned = {}
            self.count("suspended")
            logger.warning(
                "rl-accel: correct answers take longer than those from which the limits of rewards were learned; every answer"
                " has the full budget again until limits are learned anew"
            )
        if correct:
            self._learn(key, (wall, cpu, 1))

    def count(self, name: str, amount: float = 1.0) -> None:
        """Adds ``amount`` to the count ``name``, which the store sums over all replicas."""
        _add(self._counts, {name: amount})

    def take_delta(self) -> AnchorDelta:
        """Returns the changes since the last call. If the exchange fails, pass the changes to :meth:`put_back`."""
        everything = self.timeout.anchors() if self._tell_everything else {}
        delta = AnchorDelta(self._incarnation, self._version, self._learned, everything, self._counts, self.timeout.era)
        self._learned, self._counts, self._tell_everything = {}, {}, False
        return delta

    def put_back(self, delta: AnchorDelta) -> None:
        """Keeps ``delta`` for the next exchange."""
        for key, anchor in delta.learned.items() if delta.era == self.timeout.era else ():
            self._learn(key, anchor)
        _add(self._counts, delta.counts)
        self._tell_everything |= bool(delta.everything)

    def apply(self, update: Update) -> None:
        """Merges the anchors in the store's answer, which other replicas have learned."""
        if update.era > self.timeout.era:
            self.timeout.suspend(update.era)
        if update.era == self.timeout.era:
            self.timeout.merge(update.anchors)
        self._tell_everything = self._incarnation not in ("", update.incarnation)
        self._incarnation, self._version = update.incarnation, update.version

    def _learn(self, key: str, anchor: AnchorTuple) -> None:
        known = self._learned.get(key, (0.0, 0.0, 0))
        self._learned[key] = longest(known, anchor, known[2] + anchor[2])


class AnchorStore:
    """The anchors of all replicas and the sums of their counts.

    Args:
        path: file to load, if it exists, and to save to. None: memory only.
        timeout: empty policy that holds the anchors; None: a new one.

    Raises:
        ValueError: the file is damaged or has another version.
    """

    def __init__(self, path: Path | None = None, timeout: AdaptiveTimeout | None = None) -> None:
        self._timeout = AdaptiveTimeout() if timeout is None else timeout
        self.incarnation = uuid.uuid4().hex
        self._version = 0
        self._changed: OrderedDict[str, int] = OrderedDict()
        self._counts: dict[str, float] = {}
        self._path = path
        self._saved = 0
        if path is not None and path.exists():
            self._timeout.load_state_dict(json.loads(path.read_text()))
            self._touch(self._timeout.anchors())
            self._saved = self._version

    def __len__(self) -> int:
        return len(self._timeout)

    def exchange(self, delta: AnchorDelta) -> Update:
        """Merges a replica's delta and returns the anchors that the replica does not have."""
        if delta.era > self._timeout.era:
            self._timeout.suspend(delta.era)
        if delta.era == self._timeout.era:
            for key, (wall, cpu, correct) in delta.learned.items():
                self._timeout.merge({key: (wall, cpu, self._timeout.get(key)[2] + correct)})
            self._timeout.merge(delta.everything)
            if delta.learned or delta.everything:
                self._touch({**delta.learned, **delta.everything})
        _add(self._counts, delta.counts)
        since = delta.version if delta.incarnation == self.incarnation else 0
        anchors = {}
        for key in reversed(self._changed):
            if self._changed[key] <= since:
                break
            anchors[key] = self._timeout.get(key)
        return Update(self.incarnation, self._version, anchors, self._timeout.era)

    def take_counts(self) -> dict[str, float]:
        """Returns the sums of the counts since the last call."""
        counts, self._counts = self._counts, {}
        return counts

    def save(self) -> None:
        """Writes the file atomically if anything has changed."""
        if self._path is None or self._saved == self._version:
            return
        write_atomically(self._path, json.dumps(self._timeout.state_dict()))
        self._saved = self._version

    def _touch(self, keys: "dict[str, AnchorTuple]") -> None:
        self._version += 1
        for key in keys:
            self._changed[key] = self._version
            self._changed.move_to_end(key)
        while len(self._changed) > self._timeout.capacity:
            self._changed.popitem(last=False)


def _add(counts: dict[str, float], more: Mapping[str, float]) -> None:
    for name, amount in more.items():
        counts[name] = counts.get(name, 0.0) + amount
