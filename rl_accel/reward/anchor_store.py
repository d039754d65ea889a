"""Anchors (the longest correct execution of each prompt and test case) that many processes share through one store.

Each process reads and updates its own replica of the anchors, and exchanges changes with the store. A replica that cannot reach the
store continues with its own anchors. A restarted store receives all anchors from every replica. No function in this file waits for
another process.
"""

import itertools
import json
import logging
import time
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rl_accel.files import BAD_RECORD, write_atomically
from rl_accel.reward.adaptive_timeout import AdaptiveTimeout, AnchorTuple, longest

logger = logging.getLogger("rl_accel")

SAVE_SECONDS = 30.0
"""Least seconds between two saves by :meth:`AnchorStore.exchange`, because each save rewrites the whole file. Chosen by hand."""


@dataclass
class AnchorDelta:
    """New anchors (longest correct executions) and counts of one process since its last exchange with the central store.

    Attributes:
        incarnation: random id of the store process at the last exchange; "" before the first exchange.
        version: number of anchors that this store process had merged at the last exchange; 0 before the first exchange.
        learned: anchors of correct executions since then, by key (a prompt and test case).
        everything: all anchors of the process, by key, if a restarted store may have lost them; else empty.
        counts: increase of each count of executions since then, by name, such as "timeouts".
        era: number of the last suspension of limits (:meth:`AdaptiveTimeout.suspend`). The store ignores anchors of earlier eras.
    """

    incarnation: str = ""
    version: int = 0
    learned: dict[str, AnchorTuple] = field(default_factory=dict)
    everything: dict[str, AnchorTuple] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    era: int = 0


@dataclass
class Update:
    """Reply of the central store, which shares anchors (longest correct executions), to an :class:`AnchorDelta`.

    ``anchors`` are those that have changed since ``version`` of the delta. ``era`` is the number of the last suspension of limits.
    """

    incarnation: str
    version: int
    anchors: dict[str, AnchorTuple]
    era: int = 0


class LocalAnchors:
    """One process's copy of the anchors (longest correct executions), and the changes that the central store does not have yet."""

    def __init__(self, timeout: AdaptiveTimeout | None = None) -> None:
        self.timeout = AdaptiveTimeout() if timeout is None else timeout
        self._delta, self._tell_everything = AnchorDelta(), False

    def record(self, key: str, wall: float, cpu: float, correct: bool, stopped: bool = False) -> None:
        """Records an ended execution for this process and for the central store. Arguments: :meth:`AdaptiveTimeout.record`."""
        if self.timeout.record(key, wall, cpu, correct, stopped):
            self._delta.learned = {}
            self.count("suspended")
            logger.warning(
                "rl-accel: correct answers take longer than those from which the limits of rewards were learned; every answer"
                " has the full budget again until limits are learned anew"
            )
        if correct:
            self._learn(key, (wall, cpu, 1))

    def count(self, name: str, amount: float = 1.0) -> None:
        """Adds ``amount`` to the count ``name``, such as "timeouts". The central store sums each count over all processes."""
        _add(self._delta.counts, {name: amount})

    def take_delta(self) -> AnchorDelta:
        """Returns new anchors and counts of executions since the last call, to be sent to the central store.

        If sending fails, pass them to :meth:`put_back`.
        """
        delta = self._delta
        delta.everything, delta.era = self.timeout.anchors() if self._tell_everything else {}, self.timeout.era
        self._delta, self._tell_everything = AnchorDelta(delta.incarnation, delta.version), False
        return delta

    def put_back(self, delta: AnchorDelta) -> None:
        """Takes back ``delta``, which could not be sent, so that the next exchange with the store sends its anchors and counts."""
        for key, anchor in delta.learned.items() if delta.era == self.timeout.era else ():
            self._learn(key, anchor)
        _add(self._delta.counts, delta.counts)
        self._tell_everything |= bool(delta.everything)

    def apply(self, update: Update) -> None:
        """Merges the anchors (longest correct executions) in the central store's reply.

        First suspends the limits if another process has suspended its limits.
        """
        if update.era > self.timeout.era:
            self.timeout.suspend(update.era)
        if update.era == self.timeout.era:
            self.timeout.merge(update.anchors)
        self._tell_everything = self._delta.incarnation not in ("", update.incarnation)
        self._delta.incarnation, self._delta.version = update.incarnation, update.version

    def _learn(self, key: str, anchor: AnchorTuple) -> None:
        known = self._delta.learned.get(key, (0.0, 0.0, 0))
        self._delta.learned[key] = longest(known, anchor, known[2] + anchor[2])


class AnchorStore:
    """Central store: merges the anchors (longest correct executions of test cases) of all processes.

    Also adds up their counts of reward executions by name, such as "timeouts".

    Args:
        path: JSON file from which anchors are loaded and to which they are saved. Memory only if None or if it cannot be read.
        timeout: :class:`AdaptiveTimeout` without anchors, to which all anchors are added; None: a new one.
    """

    def __init__(self, path: Path | None = None, timeout: AdaptiveTimeout | None = None) -> None:
        self._timeout = AdaptiveTimeout() if timeout is None else timeout
        self.incarnation = uuid.uuid4().hex
        self._version = self._saved = 0  # numbers of keys that were ever merged, with repetitions
        self._merged: deque[str] = deque(maxlen=self._timeout.capacity)
        self._counts: dict[str, float] = {}
        self._path = path
        self._saved_at = time.monotonic()
        try:
            if path is not None and path.exists():
                self._timeout.load_state_dict(json.loads(path.read_text()))
                self._merged.extend(self._timeout.anchors())
                self._version = self._saved = len(self._timeout)
        except (OSError, *BAD_RECORD) as error:
            # If this were raised, Ray would restart the actor of this store endlessly.
            logger.warning("rl-accel: reward anchors of %s cannot be read and are learned anew: %s", path, error)
            self._path = None

    def __len__(self) -> int:
        return len(self._timeout)

    def exchange(self, delta: AnchorDelta) -> Update:
        """Merges one process's new anchors (longest correct executions) and adds its counts of executions.

        Returns the anchors that have changed since this process's last exchange.

        Saves the store if the last save is more than :data:`SAVE_SECONDS` ago.
        """
        if delta.era > self._timeout.era:
            self._timeout.suspend(delta.era)
        if delta.era == self._timeout.era:
            for key, (wall, cpu, correct) in delta.learned.items():
                self._timeout.merge({key: (wall, cpu, self._timeout.get(key)[2] + correct)})
            self._timeout.merge(delta.everything)
            keys = [*delta.learned, *delta.everything]
            self._merged.extend(keys)
            self._version += len(keys)
        _add(self._counts, delta.counts)
        new = self._version - (delta.version if delta.incarnation == self.incarnation else 0)
        if new > len(self._merged):
            anchors = self._timeout.anchors()
        else:
            anchors = {key: self._timeout.get(key) for key in itertools.islice(reversed(self._merged), new)}
        if time.monotonic() - self._saved_at > SAVE_SECONDS:
            self.save()
        return Update(self.incarnation, self._version, anchors, self._timeout.era)

    def take_counts(self) -> tuple[str, dict[str, float]]:
        """Saves the store. Returns its random id, and the counts of reward executions since the last call, by name.

        The present number of anchors (longest correct executions) is added as count ``anchors``.
        """
        self.save()
        counts, self._counts = self._counts, {}
        return self.incarnation, {**counts, "anchors": float(len(self))}

    def save(self) -> None:
        """Writes all anchors (longest correct executions) to the file of this store, if any has changed.

        A write error is only logged.
        """
        self._saved_at = time.monotonic()
        if self._path is None or self._saved == self._version:
            return
        try:
            write_atomically(self._path, json.dumps(self._timeout.state_dict()))
            self._saved = self._version
        except OSError as error:  # such as a full disk
            logger.warning("rl-accel: reward anchors could not be saved: %s", error)


def _add(counts: dict[str, float], more: Mapping[str, float]) -> None:
    for name, amount in more.items():
        counts[name] = counts.get(name, 0.0) + amount
