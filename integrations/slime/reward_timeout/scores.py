"""What rewards say, and what stands in for one that could not be had. A reward is a number, a dict, or whatever slime takes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rl_accel.features.reward_timeout import RewardTimeoutFlags


class Scores:
    """Looks at rewards as slime will, and remembers what those of each grader look like.

    Args:
        flags: our flags.
        keys: the keys that slime looks up in a reward: for training, and, if another, for evaluation.
    """

    def __init__(self, flags: RewardTimeoutFlags, keys: Sequence[str]) -> None:
        self._flags = flags
        self._keys = tuple(dict.fromkeys(keys))
        self._key = self._keys[0] if self._keys else None
        self._dicts: dict[str, Mapping[str, Any]] = {}

    def problem(self, rewards: Any, size: int) -> str:
        """Say why training cannot use these rewards of ``size`` samples; "" if it can."""
        if not isinstance(rewards, list | tuple) or len(rewards) != size:
            return f"it returned no list of {size} rewards"
        for reward in rewards:
            if reward is None:
                return "it returned nothing"
            if isinstance(reward, Mapping) and self._key and self._key not in reward:
                return f"it returned a dict without {self._key!r}"
            score = _score(reward, self._key)
            if score is not None and not math.isfinite(score):
                return f"it returned {score}"
        return ""

    def any_correct(self, rewards: Sequence[Any]) -> bool:
        scores = [_score(reward, self._key) for reward in rewards]
        return any(score is not None and score > self._flags.correct_above for score in scores)

    def remember(self, grader: str, rewards: Sequence[Any]) -> None:
        for reward in rewards:
            if isinstance(reward, Mapping):
                self._dicts[grader] = reward

    def stand_in(self, grader: str) -> Any:
        """Return a reward of ``timeout_score``. If the grader returns dicts, all their keys are there; other values are empty."""
        score, like = self._flags.timeout_score, self._dicts.get(grader)
        if like is None:
            return dict.fromkeys(self._keys, score) if self._keys else score
        named = self._keys or (("score",) if "score" in like else ())
        return {**{name: _empty(value) for name, value in like.items()}, **dict.fromkeys(named, score)}


def _score(reward: Any, key: str | None) -> float | None:
    """The number in a reward: of a dict that under ``key``, or else its ``acc`` or ``score``. None if there is none."""
    if isinstance(reward, Mapping):
        names = (key,) if key else ("acc", "score")
        reward = next((reward[name] for name in names if name in reward), None)
    if reward is None or isinstance(reward, str):
        return None
    try:
        return float(reward)
    except (TypeError, ValueError):
        return None


def _empty(value: Any) -> Any:
    return type(value)() if isinstance(value, bool | int | float | str | list | dict) else None
