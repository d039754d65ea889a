"""Adaptive time limits for reward executions, learned from correct executions (RollPacker, NSDI'26, section 5).

:class:`AdaptiveTimeout` is the policy: no clock, no processes. Call :meth:`AdaptiveTimeout.limit` before an execution, and
:meth:`AdaptiveTimeout.record` after it. :class:`LocalAnchors` is the copy of a process, :class:`AnchorStore` that of a job. Anchors
merge by maximum and totals are absolute, so that a message that is lost or sent twice changes nothing.
"""

import itertools
import json
import logging
import math
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rl_accel.features import RewardTimeoutFlags
from rl_accel.files import BAD_RECORD, write_atomically

logger = logging.getLogger("rl_accel")

_FORMAT = "rl_accel.adaptive_timeout"
_VERSION = 1

AnchorTuple = tuple[float, float, int]
"""Anchor of a prompt and test case: longest wall seconds and longest CPU seconds of correct executions, and their number."""
Reason = Literal["learning", "adaptive", "probe"]
"""Reason for the time limit of an execution.

learning: the full budget, because too few correct executions are known.
adaptive: derived from the anchor (the longest correct execution so far).
probe: the full budget, to detect correct answers that are slower than all previous ones."""

FULL_BUDGET = 300.0
"""Default full budget (longest limit) of a call of a grader, in seconds: verl's default timeout."""
PROGRAM_BUDGET = 30.0
"""Default full budget of a program under test, in seconds: the fixed timeout in published runs of RollPacker."""
_SLOW_PROBES_WITHIN = 100
"""Number of successive probes among which two correct ones beyond their limits show that limits are too short. Chosen by hand."""
SAVE_SECONDS = 30.0
"""Least seconds between two saves by :meth:`AnchorStore.exchange`, because each save rewrites the whole file. Chosen by hand."""
RECENT_ANCHORS = 2_000
"""Number of anchors in each message between a process and the store: those that have changed last. More than change in
``SAVE_SECONDS``, so that a store that is restarted from its file receives what it has lost. Chosen by hand."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Time limits of one execution: wall seconds, CPU seconds of all its processes (at least ``wall``), and the reason for both."""

    wall: float
    cpu: float
    reason: Reason


class AdaptiveTimeout:
    """Time limits per key (a prompt and test case), learned from correct executions. Not thread-safe.

    The limit of a key is ``scale * anchor + slack``, clamped to ``[minimum, maximum]``. The anchor is the longest correct execution
    so far. Until a key has ``min_correct`` correct executions, the limit is ``maximum`` (the full budget). A share ``probe_share``
    of adaptive limits is replaced by the full budget, so that slow but correct answers can raise the anchor.

    On a slow day of a machine or a judge, correct answers take longer than all before. If two of the last hundred probes are such
    answers, ``scale`` is doubled.

    Args:
        flags: values of the parameters above; None: the default values.
        capacity: maximum number of keys; the least recently used are evicted.
        caution: widens limits that rest on few executions: ``scale`` is multiplied by ``1 + caution / n`` after n correct ones.
    """

    def __init__(self, flags: RewardTimeoutFlags | None = None, capacity: int = 200_000, caution: float = 2.0) -> None:
        self.flags = flags or RewardTimeoutFlags()
        self.capacity = capacity
        self.scale = self.flags.scale
        self._caution = caution
        self._anchors: OrderedDict[str, AnchorTuple] = OrderedDict()
        self._probes_due = 0.0
        self._probes = 0
        self._last_slow_probe = -math.inf  # number of probes up to the last one that was correct beyond its limit

    def __len__(self) -> int:
        return len(self._anchors)

    @property
    def maximum(self) -> float:
        """Full budget (the longest limit) in seconds, unless the caller of :meth:`limit` sets another."""
        return self.flags.maximum or FULL_BUDGET

    def limit(self, key: str, maximum: float | None = None) -> Limit:
        """Returns the time limits of the next execution of ``key``.

        They may be those of a probe: the full budget, although a limit is known. ``maximum`` is the full budget in seconds; None:
        :attr:`maximum`.
        """
        limit = self.learned(key, maximum)
        if limit.reason != "adaptive":
            return limit
        self._probes_due += self.flags.probe_share
        if self._probes_due <= 1 - 1e-9:
            return limit
        self._probes_due -= 1
        self._probes += 1
        full = maximum or self.maximum
        return Limit(full, full, "probe")

    def learned(self, key: str, maximum: float | None = None) -> Limit:
        """Returns the limits learned for ``key``. Unlike :meth:`limit`, never gives the full budget as a probe."""
        full = maximum or self.maximum
        if key in self._anchors:
            self._anchors.move_to_end(key)
        *anchor, correct = self.get(key)
        if correct < self.flags.min_correct:
            return Limit(full, full, "learning")
        scale = self.scale * (1 + self._caution / correct)
        wall, cpu = (min(max(scale * each + self.flags.slack, self.flags.minimum), full) for each in anchor)
        # The CPU limit is not below the wall limit, because one answer may compute where another answer only waited.
        return Limit(wall, max(wall, cpu), "adaptive")

    def record(self, key: str, wall: float, cpu: float, correct: bool) -> bool:
        """Records an ended execution of ``key``. Limits are learned from correct executions only. Do not record evaluations.

        Returns True if correct answers have become so slow that ``scale`` was doubled. ``wall`` and ``cpu`` are the wall seconds
        and CPU seconds of the execution.

        Raises:
            ValueError: ``wall`` or ``cpu`` is negative or not finite.
        """
        for name, value in (("wall", wall), ("cpu", cpu)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number of at least 0, found {value!r}")
        if not correct:
            return False
        limit = self.learned(key)
        self.merge({key: (wall, cpu, self.get(key)[2] + 1)})
        # Only a probe can be correct beyond the limit; any other execution would have been stopped there.
        if limit.reason == "learning" or wall <= limit.wall:
            return False
        widens = self._probes - self._last_slow_probe < _SLOW_PROBES_WITHIN
        if widens:
            self.scale *= 2
        self._last_slow_probe = -math.inf if widens else self._probes
        return widens

    def get(self, key: str) -> AnchorTuple:
        """Returns the anchor (longest correct execution) of ``key``; zeros if ``key`` is unknown."""
        return self._anchors.get(key, (0.0, 0.0, 0))

    def merge(self, anchors: Mapping[str, AnchorTuple]) -> bool:
        """Merges anchors (longest correct executions) by key: keeps the larger values. Returns True if one has changed."""
        has_changed = False
        for key, (wall, cpu, correct) in anchors.items():
            before = self.get(key)
            merged = max(before[0], wall), max(before[1], cpu), max(before[2], correct)
            if merged != before:
                self._anchors[key] = merged
                self._anchors.move_to_end(key)
                has_changed = True
        while len(self._anchors) > self.capacity:
            self._anchors.popitem(last=False)
        return has_changed

    def anchors(self, most: int | None = None) -> dict[str, AnchorTuple]:
        """Returns at most ``most`` anchors (longest correct executions) by key, the most recently used or changed key last."""
        newest_first = list(itertools.islice(reversed(self._anchors.items()), most))
        return dict(reversed(newest_first))

    def state_dict(self) -> dict[str, Any]:
        """Returns the anchors (longest correct executions) as a JSON-serialisable dict for :meth:`load_state_dict`."""
        return {"format": _FORMAT, "version": _VERSION, "anchors": self.anchors()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces all anchors (longest correct executions) by those in ``state``, a result of :meth:`state_dict`.

        Raises:
            ValueError: ``state`` has another format or version, or is damaged. Nothing is changed in that case.
        """
        found = (state.get("format"), state.get("version")) if isinstance(state, Mapping) else (None, None)
        if found != (_FORMAT, _VERSION):
            raise ValueError(f"state must be of {(_FORMAT, _VERSION)} (format, version), found {found}")
        anchors: dict[str, AnchorTuple] = {}
        try:
            for key, (wall, cpu, correct) in state["anchors"].items():
                anchors[str(key)] = float(wall), float(cpu), int(correct)
                if not (0 <= float(wall) < math.inf and 0 <= float(cpu) < math.inf and int(correct) >= 0):
                    raise ValueError(f"anchor of {key!r} is {[wall, cpu, correct]}")
        except BAD_RECORD as error:
            raise ValueError(f"state is damaged: {type(error).__name__}: {error}") from error
        self._anchors.clear()
        self.merge(anchors)


@dataclass
class Message:
    """Message from a process to the store of its job, or the answer to it.

    Attributes:
        anchors: longest correct executions by key (a prompt and test case): those that have changed lately, or all.
        shapes: pickled empty rewards by data source. The store does not unpickle them.
        totals: counts of executions since the start of the process, by name, such as "timeouts"; {} in an answer.
        running: number of executions that run in the process; in an answer, in all other processes.
    """

    anchors: dict[str, AnchorTuple]
    shapes: dict[str, bytes]
    totals: dict[str, float] = field(default_factory=dict)
    running: int = 0


class LocalAnchors:
    """One process's copy of the anchors (longest correct executions), and its counts of executions.

    Attributes:
        process: random id of this copy.
        totals: counts of executions since the start, by name, such as "timeouts".
        shapes: pickled empty rewards by data source, see :class:`rl_accel.reward.scores.Scores`.
        running: number of executions that run in this process.
        running_elsewhere: number of executions in other processes, by the store's last answer.
    """

    def __init__(self, timeout: AdaptiveTimeout | None = None) -> None:
        self.timeout = AdaptiveTimeout() if timeout is None else timeout
        self.process = uuid.uuid4().hex
        self.totals: dict[str, float] = {}
        self.shapes: dict[str, bytes] = {}
        self.running = 0
        self.running_elsewhere = 0

    def record(self, key: str, wall: float, cpu: float, correct: bool) -> None:
        """Records an ended execution. Arguments: :meth:`AdaptiveTimeout.record`."""
        if self.timeout.record(key, wall, cpu, correct):
            self.count("widened")
            if self.totals["widened"] == 1:
                logger.warning(
                    "rl-accel: correct answers take longer than those from which the limits of rewards were learned; limits are"
                    " twice as long from now on, and again whenever that happens"
                )

    def count(self, name: str, amount: float = 1.0) -> None:
        """Adds ``amount`` to the count ``name``, such as "timeouts"."""
        self.totals[name] = self.totals.get(name, 0.0) + amount

    def message(self, everything: bool) -> Message:
        """Returns a message to the store, with the anchors that have changed lately, or with all of them."""
        anchors = self.timeout.anchors(None if everything else RECENT_ANCHORS)
        return Message(anchors, dict(self.shapes), dict(self.totals), self.running)

    def merge(self, answer: Message) -> None:
        """Merges the store's answer into this copy."""
        self.timeout.merge(answer.anchors)
        for source, shape in answer.shapes.items():
            self.shapes.setdefault(source, shape)
        self.running_elsewhere = answer.running


class AnchorStore:
    """Central store of a job: merges the anchors (longest correct executions) of all processes, and keeps the totals of each.

    Args:
        path: JSON file from which anchors are loaded and to which they are saved. Memory only if None or if it cannot be read.
        timeout: :class:`AdaptiveTimeout` without anchors, to which all anchors are added; None: a new one.
    """

    def __init__(self, path: Path | None = None, timeout: AdaptiveTimeout | None = None) -> None:
        self._timeout = AdaptiveTimeout() if timeout is None else timeout
        self._totals: dict[str, dict[str, float]] = {}
        self._running: dict[str, int] = {}
        self._shapes: dict[str, bytes] = {}
        self._path = path
        self._saved_at = time.monotonic()
        self._is_saved = True
        try:
            if path is not None and path.exists():
                self._timeout.load_state_dict(json.loads(path.read_text()))
        except (OSError, *BAD_RECORD) as error:
            # If this were raised, Ray would restart the actor of this store endlessly.
            logger.warning("rl-accel: reward anchors of %s cannot be read and are learned anew: %s", path, error)
            self._path = None

    def exchange(self, process: str, message: Message, everything: bool = False) -> Message:
        """Merges the message of a process. Returns the anchors that have changed lately, or with ``everything`` all of them.

        Saves the store if the last save is more than :data:`SAVE_SECONDS` ago.
        """
        if self._timeout.merge(message.anchors):
            self._is_saved = False
        self._totals[process] = message.totals
        self._shapes = {**message.shapes, **self._shapes}
        if time.monotonic() - self._saved_at > SAVE_SECONDS:
            self.save()
        known = self._timeout.anchors(None if everything else RECENT_ANCHORS)
        self._running[process] = message.running
        return Message(known, self._shapes, running=sum(self._running.values()) - message.running)

    def totals(self) -> tuple[dict[str, dict[str, float]], int]:
        """Saves the store. Returns the totals of each process by the id of the process, and the number of anchors."""
        self.save()
        return self._totals, len(self._timeout)

    def save(self) -> None:
        """Writes all anchors (longest correct executions) to the file of this store, if any has changed.

        A write error is only logged.
        """
        self._saved_at = time.monotonic()
        if self._path is None or self._is_saved:
            return
        try:
            write_atomically(self._path, json.dumps(self._timeout.state_dict()))
            self._is_saved = True
        except OSError as error:  # such as a full disk
            logger.warning("rl-accel: reward anchors could not be saved: %s", error)
