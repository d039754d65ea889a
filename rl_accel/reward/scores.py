"""Reads the rewards that graders return, and makes one for each response whose grader was stopped."""

import logging
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_accel.errors import RlAccelError
from rl_accel.features import RewardTimeoutFlags
from rl_accel.reward.anchor_store import Replica
from rl_accel.reward.execution import ExecutionResult

logger = logging.getLogger("rl_accel")

_MOST_WARNINGS = 100
_PLAIN = (bool, int, float, complex, str, bytes, list, tuple, set, dict)


class GraderError(RlAccelError, RuntimeError):
    """A grader ended without an answer and without an exception: its process died, or it was stopped for a limit but time."""


@dataclass
class Scores:
    """What a framework takes for a reward, and what stands in for one whose grader was stopped. A reward is a number or a dict.

    What a grader returns or raises is for the framework to judge, unless ``score_errors`` is set: then an answer whose grader
    raised, or whose reward training cannot use, gets a stand-in too.

    Frameworks want rewards of one form: a batch in which some are dicts and some are not, or in which keys differ, ends the run.
    So the keys and types of dicts are remembered by source (a grader, or a data source), and stand-ins look like them; those of a
    source that has given no reward yet look like those of another.

    Args:
        flags: ``correct_above``, ``timeout_score`` and ``score_errors``.
        replica: where responses without a reward are counted, as ``errors``, or ``eval_errors`` in an evaluation. Those whose
            grader was stopped are counted by :class:`~rl_accel.reward.limited_executor.LimitedExecutor`.
        keys: what the framework looks up in rewards, which must be dicts then and have the first of these.
        number_keys: the training's number in a dict is under the first of these that it has.
        correct_keys: and the number that says whether the answer is correct under the first of these.
        numbers_only: a reward without a number is none.
    """

    flags: RewardTimeoutFlags
    replica: Replica
    keys: Sequence[str]
    number_keys: Sequence[str]
    correct_keys: Sequence[str]
    numbers_only: bool
    _forms: dict[str, dict[str, Any] | None] = field(default_factory=dict, init=False)
    _worst: dict[str, float] = field(default_factory=dict, init=False)
    _warned: set[tuple[str, str]] = field(default_factory=set, init=False)

    def is_correct(self, result: ExecutionResult, size: int | None = None) -> bool:
        """Whether a grader found an answer correct; of several answers any. Arguments as of :meth:`reward_of`."""
        if self.problem(result, size):
            return False
        numbers = [_number_in(reward, self.correct_keys) for reward in _rewards(result, size)]
        return any(number is not None and number > self.flags.correct_above for number in numbers)

    def problem(self, result: ExecutionResult, size: int | None = None) -> str:
        """Say why training cannot use a result; "" if it can. Arguments as of :meth:`reward_of`."""
        if result.verdict != "done":
            return result.reason or result.verdict
        rewards = _rewards(result, size)
        if not isinstance(rewards, list | tuple) or len(rewards) != (size or 1):
            return f"it returned no list of {size} rewards"
        return next((problem for problem in map(self._problem_of_one, rewards) if problem), "")

    def reward_of(self, result: ExecutionResult, source: str, teach: bool, size: int | None = None) -> Any:
        """Return the reward in a result, or a stand-in of ``timeout_score``.

        Args:
            result: of a grader.
            source: where its reward comes from; stand-ins look like rewards of the same source.
            teach: False in an evaluation.
            size: the value is a list of so many rewards, and so is what is returned; None: the value is a reward.

        Raises:
            Exception: what the grader raised, unless ``score_errors`` is set; :class:`GraderError` if its process died.
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
                self.replica.count("errors" if teach else "eval_errors")
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
        """Warn if it is better for an answer to be stopped than to be wrong."""
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
    """A value of the same type that says nothing; None for types of the user's own."""
    return type(value)() if type(value) in _PLAIN or isinstance(value, np.number | np.bool_) else None
