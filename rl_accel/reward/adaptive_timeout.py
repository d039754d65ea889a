"""Adaptive time limits for reward executions, learned from correct executions (RollPacker, NSDI'26, section 5).

Pure policy: no clock, no processes. Call ``AdaptiveTimeout.limit`` before an execution, and ``AdaptiveTimeout.record`` after it.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rl_accel.features import RewardTimeoutFlags
from rl_accel.files import BAD_RECORD

_FORMAT, _VERSION = "rl_accel.adaptive_timeout", 1

AnchorTuple = tuple[float, float, int]
"""Anchor of a prompt and test case: longest wall seconds and longest CPU seconds of correct executions, and their number."""
Reason = Literal["learning", "adaptive", "probe"]
"""Reason for the time limit of an execution.

learning: the full budget, because too few correct results are known or adaptive limits are in doubt.
adaptive: derived from the anchor (the longest correct execution so far).
probe: the full budget, to detect correct answers that are slower than all previous ones."""

FULL_BUDGET, PROGRAM_BUDGET = 300.0, 30.0
"""Default full budgets (longest limits) in seconds. For a call of a grader: verl's default timeout. For a program under test: the
fixed timeout in published runs of RollPacker."""
_MAX_UNPROVEN = 4
"""Maximum number of executions that get an adaptive limit before their results show that adaptive limits fit. Chosen by hand."""
_MAX_RECENT_RECORDS = 64
"""Number of test cases that the test for slower executions leaves out: those whose longest correct execution rose last, because the
next execution is seldom longer still. Chosen by hand."""
_SUSPEND_AT = 12.0
"""Evidence (a log likelihood ratio) that executions have become slower, at which all adaptive limits are suspended. Chance alone
reaches this value at most once in exp(12) = 160,000 correct executions."""
_EVIDENCE_BEYOND_LIMIT = 4.0
"""Evidence that executions have become slower, from one correct execution that ran under the full budget and took longer than the
learned limit of its test case. Three in succession reach ``_SUSPEND_AT``."""
_RECORD_SHARE_WHEN_SLOWER = 0.7
"""Assumed probability that a correct execution is the longest of its test case so far, if executions have become slower. Chosen by
hand."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Time limits of one execution: wall seconds, CPU seconds of all its processes (at least ``wall``), and the reason for both."""

    wall: float
    cpu: float
    reason: Reason


def longest(one: AnchorTuple, other: AnchorTuple, correct: int) -> AnchorTuple:
    """Returns an anchor with the longer wall seconds and longer CPU seconds of two, and with ``correct`` correct executions."""
    return max(one[0], other[0]), max(one[1], other[1]), correct


class AdaptiveTimeout:
    """Time limits per key (a prompt and test case), learned from correct executions. Not thread-safe.

    The limit of a key is ``scale * anchor + slack``, clamped to ``[minimum, maximum]``. The anchor is the longest correct execution
    so far. Until a key has ``min_correct`` correct executions, the limit is ``maximum`` (the full budget). A share ``probe_share``
    of adaptive limits is replaced by the full budget, so that slow but correct answers can raise the anchor.

    A statistical test (CUSUM) detects that executions have become slower, for example because the machine is busy. All limits are
    then learned anew. The test counts records: correct executions that take longer than all earlier ones of their key, and more
    than half of the limit. If nothing has changed, the n-th correct execution of a key is a record with probability 1/n at most.

    Until their results are known, at most four executions get an adaptive limit, so that wrong limits stop few answers. Each
    execution that ends by itself and is no record allows two further adaptive limits.

    Args:
        flags: values of the parameters above; None: the default values.
        capacity: maximum number of keys; the least recently used are evicted.
        caution: widens limits that rest on few executions: ``scale`` is multiplied by ``1 + caution / n`` after n correct ones.
    """

    def __init__(self, flags: RewardTimeoutFlags | None = None, capacity: int = 200_000, caution: float = 2.0) -> None:
        self.flags = flags or RewardTimeoutFlags()
        self.capacity = capacity
        self._caution = caution
        self._anchors: OrderedDict[str, AnchorTuple] = OrderedDict()
        self._probes_due = 0.0
        self._unproven = 0
        self._evidence = 0.0
        self._recent_records: deque[str] = deque(maxlen=_MAX_RECENT_RECORDS)
        self.era = 0

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
        limit, full = self.learned(key, maximum), maximum or self.maximum
        if limit.reason == "adaptive":
            self._probes_due += self.flags.probe_share
            if self._probes_due > 1 - 1e-9:
                self._probes_due -= 1
                return Limit(full, full, "probe")
            if self._unproven >= _MAX_UNPROVEN:
                return Limit(full, full, "learning")
            self._unproven += 1
        return limit

    def learned(self, key: str, maximum: float | None = None) -> Limit:
        """Returns the limits learned for ``key``. Unlike :meth:`limit`, never gives the full budget as a probe."""
        full = maximum or self.maximum
        if key in self._anchors:
            self._anchors.move_to_end(key)
        *anchor, correct = self.get(key)
        if correct < self.flags.min_correct:
            return Limit(full, full, "learning")
        scale = self.flags.scale * (1 + self._caution / correct)
        wall, cpu = (min(max(scale * each + self.flags.slack, self.flags.minimum), full) for each in anchor)
        # The CPU limit is not below the wall limit, because one answer may compute where another answer only waited.
        return Limit(wall, max(wall, cpu), "adaptive")

    def expected(self, key: str, maximum: float | None = None) -> float:
        """Returns the wall seconds of the longest correct execution of ``key``; the full budget ``maximum`` if none is known."""
        wall, _, correct = self.get(key)
        return wall if correct else maximum or self.maximum

    def record(self, key: str, wall: float, cpu: float, correct: bool, stopped: bool = False) -> bool:
        """Records an ended execution of ``key``. Limits are learned from correct executions only. Do not record evaluations.

        Returns True if this execution shows that the learned limits no longer fit. All limits are then suspended.

        Args:
            wall, cpu: wall seconds and CPU seconds of the execution.
            stopped: True if the duration says nothing about limits, for example because a time limit stopped the execution.

        Raises:
            ValueError: ``wall`` or ``cpu`` is negative or not finite.
        """
        for name, value in (("wall", wall), ("cpu", cpu)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number of at least 0, found {value!r}")
        if not stopped:
            self._update_evidence(key, wall, correct)
        suspends = self._evidence >= _SUSPEND_AT
        if suspends:
            self.suspend(self.era + 1)
        if correct:
            self.merge({key: (wall, cpu, self.get(key)[2] + 1)})
        return suspends

    def forget_limit(self) -> None:
        """Lowers by one the number of adaptive limits whose results are still unknown.

        Call this if the execution that got the limit cannot show whether adaptive limits fit, for example because it was cancelled.
        """
        self._unproven = max(0, self._unproven - 1)

    def suspend(self, era: int) -> None:
        """Gives every key the full budget until enough new correct executions are known. Keeps the longest correct ones.

        ``era`` is the number of this suspension, the same in all processes.
        """
        self.era, self._evidence, self._unproven = era, 0.0, 0
        self._recent_records.clear()
        self._anchors = OrderedDict((key, (wall, cpu, 0)) for key, (wall, cpu, _) in self._anchors.items())

    def _update_evidence(self, key: str, wall: float, correct: bool) -> None:
        """Updates the evidence that executions have become slower, after an execution that ended by itself."""
        limit, (longest_before, _, known) = self.learned(key), self.get(key)
        if limit.reason == "learning" or key in self._recent_records:
            return
        by_chance = 1 / (known + 1)
        if correct and wall > longest_before and wall > limit.wall / 2:
            expected = max(0.0, math.log(_RECORD_SHARE_WHEN_SLOWER / by_chance))
            self._evidence += _EVIDENCE_BEYOND_LIMIT if wall > limit.wall else expected
            # A next execution would have to be longer than this record. That it is not says nothing about the limits.
            self._recent_records.append(key)
        else:
            self._unproven = max(0, self._unproven - 2)
            if correct:
                self._evidence = max(0.0, self._evidence + math.log((1 - _RECORD_SHARE_WHEN_SLOWER) / (1 - by_chance)))

    def get(self, key: str) -> AnchorTuple:
        """Returns the anchor (longest correct execution) of ``key``; zeros if ``key`` is unknown."""
        return self._anchors.get(key, (0.0, 0.0, 0))

    def merge(self, anchors: Mapping[str, AnchorTuple]) -> None:
        """Merges anchors (longest correct executions) of other processes by key: keeps the larger values."""
        for key, received in anchors.items():
            own = self.get(key)
            self._anchors[key] = longest(own, received, max(own[2], received[2]))
            self._anchors.move_to_end(key)
        while len(self._anchors) > self.capacity:
            self._anchors.popitem(last=False)

    def anchors(self) -> dict[str, AnchorTuple]:
        """Returns the anchors (longest correct executions) by key, the most recently used key last."""
        return dict(self._anchors)

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
