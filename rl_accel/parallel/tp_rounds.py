"""What tail batching says of a step, for the planner: the kind of its round, and the tokens generated in it."""

from collections.abc import Mapping
from typing import Any

from rl_accel.parallel.tp_decisions import RoundKind
from rl_accel.rollout.driver import METRICS_PREFIX as PREFIX


def kind_of(numbers: Mapping[str, Any]) -> RoundKind:
    """Return the kind of round that the numbers of a step are of."""
    if numbers.get(PREFIX + "short_round"):
        return "short"
    return "long" if numbers.get(PREFIX + "long_round") else "all"


def tokens_generated(numbers: Mapping[str, Any]) -> float | None:
    """Return the tokens of all responses of a step, cancelled ones too; None without tail batching."""
    found = numbers.get(PREFIX + "tokens_generated")
    return float(found) if found else None
