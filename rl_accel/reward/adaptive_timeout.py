"""How long a test case may run: a little longer than correct answers to it have taken (RollPacker, NSDI'26, section 5).

Pure: no clock, no processes. Ask :meth:`AdaptiveTimeout.limit` before an execution, report it with :meth:`AdaptiveTimeout.record`.
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
"""Longest correct execution in wall and in processor seconds, and how many were correct."""
Reason = Literal["learning", "adaptive", "probe"]
"""Why a limit is what it is. learning: too few correct results are known, or limits are in doubt: the full budget. adaptive: from
the anchor. probe: the full budget, to find out whether a correct answer takes longer than any has so far."""

FULL_BUDGET, PROGRAM_BUDGET = 300.0, 30.0
"""Seconds that a grader, and a program under test, may take without a limit, where neither user nor framework says otherwise."""
_MOST_IN_DOUBT = 4
"""Adaptive limits that may be in force, or have stopped an execution, before some execution ends within its limit."""
_MOST_SURPRISING = 64
_ENOUGH = 12.0
"""Log likelihood ratio at which limits are suspended: by chance, once in 160,000 correct executions at most."""
_BEYOND_LIMIT = 4.0
"""What a correct execution adds to it that took longer than its limit."""
_NEAR = 0.7
"""Share of correct executions that are longer than all before them, if limits do not fit any more."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What one execution may use. The first of the two that it exceeds stops it.

    Attributes:
        wall: seconds from start to end.
        cpu: seconds of processor time of the whole process tree, at least ``wall``: what stops those that compute on several
            processors.
        reason: why.
    """

    wall: float
    cpu: float
    reason: Reason


def longest(one: AnchorTuple, other: AnchorTuple, correct: int) -> AnchorTuple:
    """Return the longer times of two anchors, with the number ``correct``."""
    return max(one[0], other[0]), max(one[1], other[1]), correct


class AdaptiveTimeout:
    """Anchors by key, a key being a prompt and test case. Not thread-safe.

    The limit is ``scale`` times the anchor plus ``slack``, at least ``minimum`` and at most ``maximum``; until ``min_correct``
    results were correct it is ``maximum``, the full budget. ``probe_share`` of the adaptive limits are the full budget instead:
    without any, a correct but slow answer could never raise the anchor.

    Limits are suspended when correct executions show that they do not fit any more, such as on a slow day of a machine or a judge.
    The n-th correct execution of a key is longer than all before it with probability 1/n, whatever their distribution. A
    cumulative sum of log likelihood ratios tells when more of them are, and also take more than half of their limit; all keys have
    to be learned anew then. Lest many are stopped before that, four limits at most are in force at first: an execution that ends
    well within its limit makes room for two more, one that is stopped makes none.

    Args:
        flags: the parameters above; None: their defaults.
        capacity: keys that are remembered; the ones not used for longest are forgotten first.
        caution: while only n results were correct, ``scale`` is larger by the factor ``1 + caution / n``: the longest of a few says
            little about the next. It costs next to nothing, as the limit of most keys is ``minimum`` all the same.
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
        """The full budget, where the caller has none of its own."""
        return self.flags.maximum or FULL_BUDGET

    def limit(self, key: str, maximum: float | None = None) -> Limit:
        """Return what the next execution of ``key`` may use; ``maximum`` is its full budget."""
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
        """Return what :meth:`limit` does, without probes and doubts: for an execution that has had its limit, and goes on."""
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
        """Return the anchor in wall seconds, or the full budget if it is not known: what a scheduler sorts by."""
        wall, _, correct = self.get(key)
        return wall if correct else self.maximum

    def record(self, key: str, wall: float, cpu: float, correct: bool, stopped: bool = False) -> bool:
        """Report an execution, and whether its limit has stopped it. Only correct ones teach. Evaluations are not to be reported.

        Returns:
            Whether limits are suspended from now on, because those that are known do not fit any more.

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
        """Report that nothing will be known of an execution with a limit: it was cancelled, or is of an evaluation."""
        self._in_doubt = max(0, self._in_doubt - 1)

    def suspend(self, era: int) -> None:
        """Begin the era ``era``: all keys have the full budget until they are learned anew. Their anchors may only grow."""
        self.era, self._evidence, self._in_doubt = era, 0.0, 0
        self._surprising.clear()
        self._anchors = OrderedDict((key, (wall, cpu, 0)) for key, (wall, cpu, _) in self._anchors.items())

    def _weigh(self, key: str, wall: float, correct: bool) -> None:
        """Take an execution that ended by itself as evidence for or against the limits."""
        limit, (longest_before, _, known) = self.learned(key), self.get(key)
        if limit.reason == "learning" or key in self._surprising:
            return
        by_chance = 1 / (known + 1)
        if correct and wall > longest_before and wall > limit.wall / 2:
            self._evidence += _BEYOND_LIMIT if wall > limit.wall else max(0.0, math.log(_NEAR / by_chance))
            self._surprising.append(key)  # what comes next is compared with this one, and tells nothing
        else:
            self._in_doubt = max(0, self._in_doubt - 2)
            if correct:
                self._evidence = max(0.0, self._evidence + math.log((1 - _NEAR) / (1 - by_chance)))

    def get(self, key: str) -> AnchorTuple:
        """Return the anchor of ``key`` in wall and in processor seconds, and how many results were correct; zeros if unknown."""
        return self._anchors.get(key, (0.0, 0.0, 0))

    def merge(self, anchors: Mapping[str, AnchorTuple]) -> None:
        """Take over what others know: the longer anchor and the larger count of each key. Twice is the same as once."""
        for key, theirs in anchors.items():
            ours = self.get(key)
            self._anchors[key] = longest(ours, theirs, max(ours[2], theirs[2]))
            self._anchors.move_to_end(key)
        while len(self._anchors) > self.capacity:
            self._anchors.popitem(last=False)

    def anchors(self) -> dict[str, AnchorTuple]:
        """Return all anchors as :meth:`get` does, the key used last at the end."""
        return dict(self._anchors)

    def state_dict(self) -> dict[str, Any]:
        """Return the anchors, ready for JSON."""
        return {"format": _FORMAT, "version": _VERSION, "anchors": self.anchors()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all anchors by saved ones. Settings may differ from those of the run that saved them.

        Raises:
            ValueError: the state is of another kind or version, or damaged; nothing has changed then.
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
