"""What goes into the planner after each step, and what comes out."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

from rl_accel.parallel.tp_settings import check_number, check_whole

RoundKind = Literal["short", "long", "all"]
"""short, long: rounds of tail batching. all: what has no rounds, and final rounds."""
Change = Literal["keep", "raise", "lower", "roll back"]


@dataclass(frozen=True)
class Observation:
    """One training step.

    Args:
        kind: of its round.
        tp: the tensor-parallel size that it ran at, whatever was decided before.
        preemptions: sequences evicted from the key-value caches of all servers in this step; ``None``: unknown, which is not 0.
        rollout_seconds: from the first launch until the batch was complete.
        tokens: generated in that time, those of aborted responses too.
        kv_use: the largest share of a server's cache in use, 0 to 1; ``None``: unknown.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range. Negative preemptions are an error: some engines report -1 for unknown.
    """

    kind: RoundKind
    _: KW_ONLY
    tp: int
    preemptions: int | None
    rollout_seconds: float
    tokens: int
    kv_use: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(RoundKind):
            raise ValueError(f"kind must be one of {', '.join(get_args(RoundKind))}, found {self.kind!r}")
        check_whole("tp", self.tp, 1)
        check_whole("tokens", self.tokens, 1)
        check_number("rollout_seconds", self.rollout_seconds, 1e-9)
        if self.preemptions is not None:
            check_whole("preemptions", self.preemptions, 0)
        if self.kv_use is not None:
            check_number("kv_use", self.kv_use, 0.0, 1.0)

    @property
    def log_rate(self) -> float:
        """The logarithm of rollout seconds per token: a change by a factor is then a difference."""
        return math.log(self.rollout_seconds / self.tokens)


@dataclass(frozen=True)
class Decision:
    """What the next step should run at.

    Attributes:
        tp: the size for the next step.
        change: what that is to the size of the step just seen. roll back: to the size before the last change.
        reason: why, in one line, with the numbers.
        expected: the effect of the change, in words; "nothing changes" with keep.
        expected_ratio: rollout seconds per token afterwards over now, where this run has measured both; else ``None``.
    """

    tp: int
    change: Change
    reason: str
    expected: str = "nothing changes"
    expected_ratio: float | None = None
