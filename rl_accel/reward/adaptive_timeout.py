"""Adaptive time limits for reward executions, learned from correct executions (RollPacker, NSDI'26, section 5).

Pure policy: no clock, no processes. Call ``AdaptiveTimeout.limit`` before an execution, and ``AdaptiveTimeout.record`` after it.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rl_accel.features import RewardTimeoutFlags

_FORMAT = "rl_accel.adaptive_timeout"
_VERSION = 1

AnchorTuple = tuple[float, float, int]
"""An anchor: longest correct execution in wall seconds and in CPU seconds, and the number of correct executions."""
Reason = Literal["learning", "adaptive", "probe"]
"""Reason for a limit. learning: the full budget, as too few correct results are known or limits are in doubt. adaptive: derived
from the anchor. probe: the full budget, to detect correct answers that are slower than all previous ones."""

FULL_BUDGET, PROGRAM_BUDGET = 300.0, 30.0
"""Full budgets in seconds of a grader and of a program under test, unless the user or the framework sets one."""
_MOST_IN_DOUBT = 4
"""Maximum number of adaptive limits that are in force, or have stopped an execution, before an execution ends within its limit."""
_MOST_SURPRISING = 64
_ENOUGH = 12.0
"""Log likelihood ratio at which limits are suspended. Chance alone causes this at most once in 160,000 correct executions."""
_BEYOND_LIMIT = 4.0
"""Log likelihood ratio that a correct execution adds if it took longer than its limit."""
_NEAR = 0.7
"""Assumed share of correct executions that are longer than all before them, if limits no longer fit."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Time limits of one execution; exceeding either stops the execution.

    Attributes:
        wall: seconds from start to end.
        cpu: CPU seconds of the whole process tree, at least ``wall``. Stops programs that compute on several cores.
        reason: why this limit applies.
    """

    wall: float
    cpu: float
    reason: Reason


def longest(one: AnchorTuple, other: AnchorTuple, correct: int) -> AnchorTuple:
    """Returns an anchor with the longer times of two anchors and the number ``correct``."""
    return max(one[0], other[0]), max(one[1], other[1]), correct


class AdaptiveTimeout:
    """Time limits per key (a prompt and test case), learned from correct executions. Not thread-safe.

    The limit is ``scale * anchor + slack``, clamped to ``[minimum, maximum]``. Until a key has ``min_correct`` correct executions,
    the limit is ``maximum`` (the full budget). A share ``probe_share`` of adaptive limits is replaced by the full budget; without
    these probes, a slow but correct answer could never raise the anchor.

    Limits are suspended when correct executions show that the limits no longer fit, such as on a slow day of a machine or a judge.
    The n-th correct execution of a key is longer than all before it (a record) with probability 1/n, whatever the distribution. A
    cumulative sum of log likelihood ratios detects too many records that also take more than half of their limit. All keys must
    then be learned anew. At most four limits are in force at first, so that few answers are stopped before this detection. An
    execution that ends by itself without such a record makes room for two more; a stopped execution makes none.

    Args:
        flags: the parameters above; None: their defaults.
        capacity: maximum number of keys; the least recently used are evicted.
        caution: widens limits that rest on few samples: with n correct executions, ``scale`` is multiplied by ``1 + caution / n``.
            The cost is small, as the limit of most keys is ``minimum`` anyway.
    """

    def __init__(self, flags: RewardTimeoutFlags | None = None, capacity: int = 200_000, caution: float = 2.0) -> None:
        self.flags = flags or RewardTimeoutFlags()
        self.capacity = capacity
        self._caution = caution
        self._anchors: OrderedDict[str, AnchorTuple] = OrderedDict()
        self._until_probe = self._period()
        self._in_doubt = 0
        self._evidence = 0.0
        self._surprising: deque[str] = deque(maxlen=_MOST_SURPRISING)
        self.era = 0

    def __len__(self) -> int:
        return len(self._anchors)

    @property
    def maximum(self) -> float:
        """Full budget in seconds, if the caller sets none."""
        return self.flags.maximum or FULL_BUDGET

    def limit(self, key: str, maximum: float | None = None) -> Limit:
        """Returns the limit of the next execution of ``key``; ``maximum`` is the full budget in seconds."""
        limit, full = self.learned(key, maximum), maximum or self.maximum
        if limit.reason == "adaptive":
            if self._until_probe is not None:
                self._until_probe -= 1
                if self._until_probe <= 0:
                    self._until_probe = self._period()
                    return Limit(full, full, "probe")
            if self._in_doubt >= _MOST_IN_DOUBT:
                return Limit(full, full, "learning")
            self._in_doubt += 1
        return limit

    def learned(self, key: str, maximum: float | None = None) -> Limit:
        """Returns the limit without probes and doubts (see :meth:`limit`), to update an execution that is already running."""
        full = maximum or self.maximum
        if key in self._anchors:
            self._anchors.move_to_end(key)
        *anchor, correct = self.get(key)
        if correct < self.flags.min_correct:
            return Limit(full, full, "learning")
        wall, cpu = (self._from(seconds, correct, full) for seconds in anchor)
        # Not below the wall limit: one answer may compute what another has waited for.
        return Limit(wall, max(wall, cpu), "adaptive")

    def expected(self, key: str) -> float:
        """Returns the expected wall seconds, by which a scheduler sorts: the anchor, or the full budget without an anchor."""
        wall, _, correct = self.get(key)
        return wall if correct else self.maximum

    def record(self, key: str, wall: float, cpu: float, correct: bool, stopped: bool = False) -> bool:
        """Records an execution; ``stopped`` if its limit stopped it. Only correct executions teach. Never record evaluations.

        Returns:
            True if limits are suspended from now on, because the known ones no longer fit.

        Raises:
            ValueError: a time is negative or not finite.
        """
        for name, value in (("wall", wall), ("cpu", cpu)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number of at least 0, found {value!r}")
        if not stopped:
            self._weigh(key, wall, correct)
        suspends = self._evidence >= _ENOUGH
        if suspends:
            self.suspend(self.era + 1)
        if correct:
            self.merge({key: (wall, cpu, self.get(key)[2] + 1)})
        return suspends

    def forget_limit(self) -> None:
        """Records that an execution with a limit has no usable result, because it was cancelled or belongs to an evaluation."""
        self._in_doubt = max(0, self._in_doubt - 1)

    def suspend(self, era: int) -> None:
        """Starts the era ``era``: all keys have the full budget until they are learned anew. Anchors are kept and may only grow."""
        self.era, self._evidence, self._in_doubt = era, 0.0, 0
        self._surprising.clear()
        self._anchors = OrderedDict((key, (wall, cpu, 0)) for key, (wall, cpu, _) in self._anchors.items())

    def _weigh(self, key: str, wall: float, correct: bool) -> None:
        """Updates the evidence against the limits with an execution that ended by itself."""
        limit, (longest_before, _, known) = self.learned(key), self.get(key)
        if limit.reason == "learning" or key in self._surprising:
            return
        by_chance = 1 / (known + 1)
        if correct and wall > longest_before and wall > limit.wall / 2:
            self._evidence += _BEYOND_LIMIT if wall > limit.wall else max(0.0, math.log(_NEAR / by_chance))
            self._surprising.append(key)  # the next execution would be compared with this one: no evidence
        else:
            self._in_doubt = max(0, self._in_doubt - 2)
            if correct:
                self._evidence = max(0.0, self._evidence + math.log((1 - _NEAR) / (1 - by_chance)))

    def get(self, key: str) -> AnchorTuple:
        """Returns the anchor of ``key`` in wall and CPU seconds, and the number of correct results; zeros if unknown."""
        return self._anchors.get(key, (0.0, 0.0, 0))

    def merge(self, anchors: Mapping[str, AnchorTuple]) -> None:
        """Merges anchors of other processes: the longer anchor and the larger count per key. Idempotent."""
        for key, theirs in anchors.items():
            ours = self.get(key)
            self._anchors[key] = longest(ours, theirs, max(ours[2], theirs[2]))
            self._anchors.move_to_end(key)
        while len(self._anchors) > self.capacity:
            self._anchors.popitem(last=False)

    def anchors(self) -> dict[str, AnchorTuple]:
        """Returns all anchors by key, in the form of :meth:`get`; the most recently used key is last."""
        return dict(self._anchors)

    def state_dict(self) -> dict[str, Any]:
        """Returns the anchors as a JSON-serialisable dict."""
        return {"format": _FORMAT, "version": _VERSION, "anchors": self.anchors()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces all anchors by saved ones. The flags may differ from those of the saved run.

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
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"state is damaged: {type(error).__name__}: {error}") from error
        self._anchors.clear()
        self.merge(anchors)

    def _from(self, anchor: float, correct: int, full: float) -> float:
        wanted = self.flags.scale * (1 + self._caution / correct) * anchor + self.flags.slack
        return min(max(wanted, self.flags.minimum), full)

    def _period(self) -> int | None:
        return round(1 / self.flags.probe_share) if self.flags.probe_share else None
