"""How long a test case may run: a little longer than correct answers to it have taken (RollPacker, NSDI'26, section 5).

Pure: no clock, no processes. Ask :meth:`AdaptiveTimeout.limit` before an execution, report it with :meth:`AdaptiveTimeout.record`.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rl_accel.features import RewardTimeoutFlags

_FORMAT = "rl_accel.adaptive_timeout"
_VERSION = 1

AnchorTuple = tuple[float, float, int]
"""Longest correct execution in wall and in processor seconds, and how many were correct."""
Reason = Literal["learning", "adaptive", "probe"]
"""Why a limit is what it is. learning: too few correct results are known, the full budget. adaptive: from the anchor. probe: the
full budget, to find out whether a correct answer takes longer than any has so far."""


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

    def __len__(self) -> int:
        return len(self._anchors)

    def limit(self, key: str) -> Limit:
        """Return what the next execution of ``key`` may use."""
        limit = self.learned(key)
        if limit.reason == "adaptive" and self._until_probe is not None:
            self._until_probe -= 1
            if self._until_probe <= 0:
                self._until_probe = self._period()
                return Limit(self.flags.maximum, self.flags.maximum, "probe")
        return limit

    def learned(self, key: str) -> Limit:
        """Return what :meth:`limit` does, and never a probe: for an execution that has had its limit, and goes on."""
        if key in self._anchors:
            self._anchors.move_to_end(key)
        *anchor, correct = self.get(key)
        if correct < self.flags.min_correct:
            return Limit(self.flags.maximum, self.flags.maximum, "learning")
        wall, cpu = (self._from(seconds, correct) for seconds in anchor)
        # Not below the wall limit: one answer may compute what another has waited for.
        return Limit(wall, max(wall, cpu), "adaptive")

    def expected(self, key: str) -> float:
        """Return the anchor in wall seconds, or the full budget if it is not known: what a scheduler sorts by."""
        wall, _, correct = self.get(key)
        return wall if correct else self.flags.maximum

    def record(self, key: str, wall: float, cpu: float, correct: bool) -> None:
        """Report an execution. Only correct ones teach. Evaluations are not to be reported.

        Raises:
            ValueError: a time is negative or not finite.
        """
        for name, value in (("wall", wall), ("cpu", cpu)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number of at least 0, found {value!r}")
        if correct:
            most = self.flags.maximum
            self.merge({key: (min(wall, most), min(cpu, most), self.get(key)[2] + 1)})

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

    def _from(self, anchor: float, correct: int) -> float:
        wanted = self.flags.scale * (1 + self._caution / correct) * anchor + self.flags.slack
        return min(max(wanted, self.flags.minimum), self.flags.maximum)

    def _period(self) -> int | None:
        return round(1 / self.flags.probe_share) if self.flags.probe_share else None
