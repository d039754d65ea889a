"""Checks of saved values: each returns what it is given, or raises ValueError."""

import math
from typing import Any, get_args

from rl_accel.parallel.tp_decisions import RoundKind


def whole(value: Any, least: int = 0) -> int:
    """A whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"wanted a whole number of at least {least}, found {value!r}")
    return value


def number(value: Any, least: float = 0.0) -> float:
    """A finite number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (least <= value < math.inf):
        raise ValueError(f"wanted a finite number of at least {least:g}, found {value!r}")
    return float(value)


def kind_of(value: Any) -> RoundKind:
    """A round kind."""
    if value not in get_args(RoundKind):
        raise ValueError(f"wanted a round kind, found {value!r}")
    kind: RoundKind = value
    return kind


def truth(value: Any) -> bool:
    """A truth value."""
    if not isinstance(value, bool):
        raise ValueError(f"wanted true or false, found {value!r}")
    return value
