"""Chooses the tensor-parallel size (TP) of the rollout engine from preemptions, after RollPacker (NSDI'26, section 4).

A larger TP size leaves more memory for the key-value cache, and costs communication.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean

RAISE_ABOVE = 1.05
"""Ratio of preemptions in the latest steps to those in earlier steps above which the TP size doubles (from RollPacker)."""
CALM_STEPS = 4
"""Number of training steps in a row without a preemption after which the TP size halves (value from RollPacker)."""
EARLIER_STEPS = 12
LATEST_STEPS = 3
"""The TP size doubles if each of the LATEST_STEPS steps has more preemptions than all EARLIER_STEPS steps before. By chance alone,
that happens to one window of steps in 455."""
FEW_PREEMPTIONS = 10
"""Smaller numbers of preemptions in a step count as this number, so that a rise from 1 to 5 preemptions counts as no rise."""


@dataclass(frozen=True)
class TpChange:
    """A change of the TP size for which the planner asks.

    Attributes:
        tp: TP size for the next step.
        min_tp: smallest TP size from now on, so that the size does not swing between two values.
        reason: line for the log with both sizes and the reason.
    """

    tp: int
    min_tp: int
    reason: str


class TpPlanner:
    """Decides after each training step whether the TP size of the rollout engine should change.

    The TP size doubles when preemptions rise (:func:`rises`), and halves after :data:`CALM_STEPS` steps without any. The planner
    asks only once for each size.

    Args:
        sizes: the possible TP sizes.
        tp: current TP size.
    """

    def __init__(self, sizes: Collection[int], tp: int) -> None:
        self._sizes = sizes
        self._tp = tp
        self._asked: set[int] = set()
        self._counts: dict[str, deque[int]] = {}
        self._calm = 0  # number of steps in a row without a preemption

    def step(self, kind: str, preemptions: int | None) -> TpChange | None:
        """Takes in the number of preemptions in a training step; None: unknown. Returns the change for the next step, if any.

        ``kind`` is the kind of round with tail batching, else any fixed text. Only steps of the same kind are compared.
        """
        self._calm = self._calm + 1 if preemptions == 0 else 0
        if preemptions is None:
            return None
        counts = self._counts.setdefault(kind, deque(maxlen=EARLIER_STEPS + LATEST_STEPS))
        counts.append(preemptions)
        if rises(counts):
            *earlier, first, second, third = counts
            lowest = min(first, second, third)
            reason = f"{LATEST_STEPS} steps with {lowest} preemptions or more, after {fmean(earlier):.4g} on average"
            return self._ask("raise", 2 * self._tp, 2 * self._tp, reason)
        needs_memory = any(of_kind[-1] for of_kind in self._counts.values())
        if self._calm >= CALM_STEPS and self._tp % 2 == 0 and not needs_memory:
            return self._ask("lower", self._tp // 2, 1, f"{self._calm} steps in a row without a preemption")
        return None

    def _ask(self, verb: str, tp: int, min_tp: int, reason: str) -> TpChange | None:
        if tp not in self._sizes or tp in self._asked:
            return None
        self._asked.add(tp)
        return TpChange(tp, min_tp, f"{verb} TP {self._tp} to {tp}: {reason}")


def rises(counts: Sequence[int]) -> bool:
    """Returns True if preemptions have risen. ``counts`` are the numbers of preemptions in successive steps of one kind.

    Compares the :data:`LATEST_STEPS` last steps with the :data:`EARLIER_STEPS` steps before.
    """
    if len(counts) < EARLIER_STEPS + LATEST_STEPS:
        return False
    values = [max(count, FEW_PREEMPTIONS) for count in counts]
    earlier = values[-EARLIER_STEPS - LATEST_STEPS : -LATEST_STEPS]
    lowest = min(values[-LATEST_STEPS:])
    return lowest > max(earlier) and lowest > RAISE_ABOVE * fmean(earlier)
