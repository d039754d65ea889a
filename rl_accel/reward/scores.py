"""Reads rewards from the results of graders, and makes a substitute reward for each response whose grader was stopped."""

import logging
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_accel.errors import RlAccelError
from rl_accel.features import RewardTimeoutFlags
from rl_accel.reward.anchor_store import LocalAnchors
from rl_accel.reward.execution import ExecutionResult

logger = logging.getLogger("rl_accel")

_MOST_WARNINGS = 100
_PLAIN = (bool, int, float, complex, str, bytes, list, tuple, set, dict)


class GraderError(RlAccelError, RuntimeError):
    """A grader ended without a result and without an exception.

    Either the process of the grader died, or a limit other than the time limit stopped the grader.
    """


@dataclass
class Scores:
    """Reads the reward from each grader result, and makes a stand-in (a substitute reward) if the grader was stopped.

    A reward is a number or a dict. Normally the framework gets whatever a grader returns or raises. With the flag ``score_errors``,
    a response also gets a stand-in if its grader raised an exception or if training cannot use its reward.

    A batch that mixes dicts and numbers, or dicts with different keys, ends the run. A stand-in therefore has the form of earlier
    rewards of its source (a grader or a data source), or else of another source.

    Args:
        flags: settings, of which ``correct_above``, ``timeout_score`` and ``score_errors`` are used.
        anchors: counts of this process. This class counts responses without a usable reward as ``errors``, or ``eval_errors`` in an
            evaluation. :class:`~rl_accel.reward.limited_executor.LimitedExecutor` counts responses whose grader was stopped.
        keys: keys that the framework reads from a dict reward. The first key is required.
        number_keys: keys of a dict reward that may hold the training score. The first of these keys that the dict has is used.
        correct_keys: keys of a dict reward that may hold the number that tells whether the answer is correct. The first of these
            keys that the dict has is used.
        numbers_only: True if training cannot use a reward without a number.
    """

    flags: RewardTimeoutFlags
    anchors: LocalAnchors
    keys: Sequence[str]
    number_keys: Sequence[str]
    correct_keys: Sequence[str]
    numbers_only: bool
    _forms: dict[str, dict[str, Any] | None] = field(default_factory=dict, init=False)
    _worst: dict[str, float] = field(default_factory=dict, init=False)
    _warned: set[tuple[str, str]] = field(default_factory=set, init=False)

    def is_correct(self, result: ExecutionResult, size: int | None = None) -> bool:
        """True if the grader found the answer, or at least one of several answers, correct. Arguments as for :meth:`reward_of`."""
        if self.problem(result, size):
            return False
        numbers = [_number_in(reward, self.correct_keys) for reward in _rewards(result, size)]
        return any(number is not None and number > self.flags.correct_above for number in numbers)

    def problem(self, result: ExecutionResult, size: int | None = None) -> str:
        """Returns the reason why training cannot use ``result``, or "" if there is none. Arguments as for :meth:`reward_of`."""
        if result.verdict != "done":
            return result.reason or result.verdict
        rewards = _rewards(result, size)
        if not isinstance(rewards, list | tuple) or len(rewards) != (size or 1):
            return f"it returned no list of {size} rewards"
        return next((problem for problem in map(self._problem_of_one, rewards) if problem), "")

    def reward_of(self, result: ExecutionResult, source: str, teach: bool, size: int | None = None) -> Any:
        """Returns the reward in ``result``, or a stand-in (a substitute reward) with the score ``timeout_score``.

        Args:
            result: result of a call of the grader.
            source: name of the grader or data source. A stand-in has the form of this source's rewards: a number, or the same keys.
            teach: False in an evaluation, whose errors are counted separately.
            size: number of rewards if the grader returned a list of rewards; this method then returns a list too. None if the
                grader returned a single reward.

        Raises:
            Exception: exception that a trusted grader raised, or a :class:`GraderError` if the grader ended otherwise without a
                result. With the flag ``score_errors``, a stand-in is returned instead.
        """
        problem = self.problem(result, size)
        if not problem:
            for reward in _rewards(result, size):
                self._learn(reward, source)
            return result.value
        if result.verdict == "timeout":
            self._compare(source)
        else:
            if result.verdict in ("done", "error"):
                self.anchors.count("errors" if teach else "eval_errors")
            if not self.flags.score_errors:
                if result.verdict == "done":
                    return result.value
                raise result.error or GraderError(f"no reward for a response from {source}: {problem}")
            score = f"Such responses get {self.flags.timeout_score:g}, and are counted; this is logged once"
            self._warn(source, problem.split(":")[0], f"no reward for a response from {source}: {problem}. {score}")
        return self._stand_in(source) if size is None else [self._stand_in(source) for _ in range(size)]

    def _problem_of_one(self, reward: Any) -> str:
        if reward is None:
            return "it returned None"
        if isinstance(reward, Mapping) and self.keys and self.keys[0] not in reward:
            return f"it returned a dict without {self.keys[0]!r}"
        number = _number_in(reward, self.number_keys)
        if number is None:
            return f"it returned {reprlib.repr(reward)}, which is no score" if self.numbers_only else ""
        return "" if math.isfinite(number) else f"it returned {number}"

    def _learn(self, reward: Any, source: str) -> None:
        is_dict = isinstance(reward, Mapping)
        self._forms[source] = {key: _empty(value) for key, value in reward.items()} if is_dict else None
        number = _number_in(reward, self.number_keys)
        if number is not None:
            self._worst[source] = min(number, self._worst.get(source, math.inf))

    def _compare(self, source: str) -> None:
        """Logs a warning if a stopped answer gets a higher score than the worst answer from ``source`` so far."""
        worst, score = self._worst.get(source, math.inf), self.flags.timeout_score
        if score > worst:
            wrong = f"a stopped answer from {source} gets {score:g}, more than the {worst:g} of a wrong one"
            self._warn(source, "timeout_score", f"{wrong}: set rl_accel.reward_timeout.timeout_score")

    def _stand_in(self, source: str) -> Any:
        score = self.flags.timeout_score
        form = self._forms.get(source, next(iter(self._forms.values()), None))
        if form is None:
            return dict.fromkeys(self.keys, score) if self.keys else score
        return {**form, **dict.fromkeys(self.keys or {"score"} & form.keys(), score)}

    def _warn(self, source: str, kind: str, text: str) -> None:
        if (source, kind) not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add((source, kind))
            logger.warning("rl-accel: %s", text)


def _rewards(result: ExecutionResult, size: int | None) -> Any:
    return [result.value] if size is None else result.value


def _number_in(reward: Any, keys: Sequence[str]) -> float | None:
    if isinstance(reward, Mapping):
        reward = next((reward[key] for key in keys if key in reward), None)
    if reward is None or isinstance(reward, str | bytes):
        return None
    try:
        return float(reward)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several numbers
        return None


def _empty(value: Any) -> Any:
    """Returns an empty value of the same type as ``value``, such as 0 or "". Returns None for user-defined types."""
    return type(value)() if type(value) in _PLAIN or isinstance(value, np.number | np.bool_) else None
