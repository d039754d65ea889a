"""What became of the prompts of one training step."""

from dataclasses import dataclass, field
from typing import Any

from rl_accel.rollout.tail_decisions import RoundMetrics, TrainBatch


@dataclass
class Settled:
    """The prompts settled in a step: id to the data set's own index of its row, and of failed ones the last error too."""

    trained: dict[str, Any] = field(default_factory=dict)
    rejected: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """A batch and how it came about.

    Attributes:
        batch: what to train on.
        results: of its responses, group by group, in the order they were generated.
        settled: the prompts of the batch, and those that were rejected or failed on the way to it.
        rounds: more than one if a round could not be filled.
    """

    batch: TrainBatch
    results: tuple[Any, ...]
    settled: Settled
    rounds: tuple[RoundMetrics, ...]
