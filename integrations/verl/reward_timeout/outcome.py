"""What came of scoring a response: which values are scores, which are correct, and what stands in for one that is missing."""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """The end of a scoring.

    Attributes:
        value: what the function returned.
        stopped: it was stopped, or its process died, before it returned; in words.
        problem: it raised; in words.
    """

    value: Any = None
    stopped: str = ""
    problem: str = ""

    def trouble(self) -> str:
        """Return why there is no score; "" if there is one."""
        if self.stopped or self.problem:
            return self.stopped or self.problem
        return "" if score_of(self.value) is not None else f"it returned {_short(self.value)}, which is no score"


def score_of(value: Any) -> float | None:
    """Return the number that verl will train on, of a number or a dict with a ``score``; None if there is none, or NaN."""
    return _number(value.get("score") if isinstance(value, dict) else value)


def is_correct(value: Any, above: float) -> bool:
    """Whether a value is of a correct answer: its ``acc`` if it has one, its score otherwise, is more than ``above``."""
    score = score_of(value)
    if score is None:
        return False
    found = _number(value["acc"]) if isinstance(value, dict) and "acc" in value else score
    return found is not None and found > above


class Substitutes:
    """Makes the value of a response that has no score look like those of others.

    verl's trainers want the same ``reward_extra_info`` of all responses of a batch: the legacy one raises KeyError, the V1 one
    takes means over fewer. So keys and types are remembered, by data source. Before any is known a plain number is all there is.
    """

    def __init__(self) -> None:
        self._seen: dict[str, Any] = {}

    def learn(self, data_source: str, value: Any) -> None:
        """Remember the keys of ``value``."""
        self._seen[data_source] = (
            {key: _neutral(item) for key, item in value.items()} if isinstance(value, dict) else None
        )

    def make(self, data_source: str, score: float) -> Any:
        """Return ``score`` in the form of the values of ``data_source``, or of any other if there are none yet."""
        form = self._seen.get(data_source, next(iter(self._seen.values()), None))
        return score if form is None else {**form, "score": score}


def _number(value: Any) -> float | None:
    if value is None or isinstance(value, str | bytes):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several numbers
        return None
    return number if math.isfinite(number) else None


def _neutral(item: Any) -> Any:
    if item is None:
        return None
    try:
        return type(item)()
    except Exception:  # some class of the user's
        return None


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:100]}..."
