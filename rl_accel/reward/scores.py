"""Reads rewards from the results of graders, and makes a substitute reward for each response whose grader was stopped."""

import asyncio
import contextlib
import logging
import math
import numbers
import pickle
import reprlib
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_accel.errors import RlAccelError
from rl_accel.features import RewardTimeoutFlags
from rl_accel.reward.adaptive_timeout import LocalAnchors
from rl_accel.reward.grader_process import dumps
from rl_accel.reward.limited_executor import ExecutionResult

logger = logging.getLogger("rl_accel")

_MOST_WARNINGS = 100
_POLL_SECONDS = 0.2
"""Seconds between two looks for the first reward of a data source. Chosen by hand."""
_PLAIN = (bool, int, float, complex, str, bytes, list, tuple, set, dict)


class GraderError(RlAccelError, RuntimeError):
    """A grader ended without a result and without an exception: its process died, or exceeded a limit other than the time limit."""


async def _exchange_nothing() -> None:
    """Exchanges nothing, for a process without others."""


@dataclass
class Scores:
    """Reads the reward from each grader result, and makes a stand-in (a substitute reward) if the grader was stopped.

    A reward is a number or a dict; on slime it may be anything else, too. With the flag ``score_errors``, a response also gets a
    stand-in if its grader raised an exception or if training cannot use its reward. Without the flag, the framework gets this
    exception or reward.

    A stand-in has the form (number, or keys of a dict) of other rewards of its source (a grader or a data source), because a batch
    with several forms would end the run with an error, or lose keys. The first reward of a source in the whole job decides.

    Args:
        flags: settings, of which ``correct_above``, ``timeout_score`` and ``score_errors`` are used.
        anchors: holds this process's counts of reward executions. Responses without a usable reward are added to the count
            ``errors``, or in evaluations ``eval_errors``.
        keys: keys that the framework reads from a dict reward: the first in training, the last in evaluations. A dict without this
            key is unusable. Empty if the framework needs no key.
        number_keys: keys of a dict reward that may hold the training score. The first of these keys that the dict has is used.
        correct_keys: keys of a dict reward that may hold the number that tells whether the answer is correct. The first of these
            keys that the dict has is used.
        numbers_only: True if training cannot use a reward without a number.
        exchange: async function that exchanges the forms of rewards with other processes.
        shape_seconds: maximum seconds for which a stand-in waits for the first reward of its source. Then it has the form of
            another source.
    """

    flags: RewardTimeoutFlags
    anchors: LocalAnchors
    keys: Sequence[str]
    number_keys: Sequence[str]
    correct_keys: Sequence[str]
    numbers_only: bool
    exchange: Callable[[], Awaitable[None]] = _exchange_nothing
    shape_seconds: float = 30.0
    _without_shape: set[str] = field(default_factory=set, init=False)
    _worst: dict[str, float] = field(default_factory=dict, init=False)
    _warned: set[tuple[str, str]] = field(default_factory=set, init=False)

    def is_correct(self, result: ExecutionResult, size: int | None = None) -> bool:
        """True if the grader judged the answer, or one of several answers, correct. Arguments as for :meth:`reward_of`."""
        if self.problem(result, size):
            return False
        numbers = [_number_in(reward, self.correct_keys) for reward in _rewards(result, size)]
        return any(number is not None and number > self.flags.correct_above for number in numbers)

    def problem(self, result: ExecutionResult, size: int | None = None, teach: bool = True) -> str:
        """Returns the reason why training cannot use ``result``, or "" if there is none. Arguments as for :meth:`reward_of`."""
        if result.verdict != "done":
            return result.reason or result.verdict
        rewards = _rewards(result, size)
        if len(rewards) != (size or 1):
            return f"it returned no list of {size} rewards"
        return next((problem for reward in rewards if (problem := self._problem_of_one(reward, teach))), "")

    async def reward_of(self, result: ExecutionResult, source: str, teach: bool, size: int | None = None) -> Any:
        """Returns the reward in ``result``, or after a timeout, a stand-in: a substitute reward with the score ``timeout_score``.

        With the flag ``score_errors``, also returns a stand-in after another failure.

        Args:
            source: name of the grader or data source.
            teach: False in an evaluation, whose errors are counted separately.
            size: number of rewards in the list that the grader and this method should return; None: a single reward.

        Raises:
            Exception: the grader raised this exception, or ended otherwise without a result (:class:`GraderError`). Not raised if
                the flag ``score_errors`` is set.
        """
        problem = self.problem(result, size, teach)
        if not problem:
            for reward in _rewards(result, size):
                self._learn_shape(source, reward)
                number = _number_in(reward, self.number_keys)
                if number is not None:
                    self._worst[source] = min(number, self._worst.get(source, math.inf))
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
        return await self._stand_in(source) if size is None else [await self._stand_in(source) for _ in range(size)]

    def _problem_of_one(self, reward: Any, teach: bool) -> str:
        if reward is None:
            return "it returned None"
        key = self.keys[0 if teach else -1] if self.keys else None
        if isinstance(reward, Mapping) and key is not None and key not in reward:
            return f"it returned a dict without {key!r}"
        number = _number_in(reward, self.number_keys)
        if number is None:
            return f"it returned {reprlib.repr(reward)}, which is no score" if self.numbers_only else ""
        return "" if math.isfinite(number) else f"it returned {number}"

    def _compare(self, source: str) -> None:
        """Logs a warning if ``timeout_score`` exceeds the lowest score from ``source``: a timeout would beat a wrong answer."""
        worst = self._worst.get(source, math.inf)
        score = self.flags.timeout_score
        if score > worst:
            wrong = f"a stopped answer from {source} gets {score:g}, more than the {worst:g} of a wrong one"
            self._warn(source, "timeout_score", f"{wrong}: set rl_accel.reward_timeout.timeout_score")

    def _learn_shape(self, source: str, reward: Any) -> None:
        """Keeps the stand-in of ``source``, for all processes of the job. Pickled, because each response gets a copy."""
        if source in self.anchors.shapes:
            return
        score = self.flags.timeout_score
        stand_in: Any = score
        if isinstance(reward, Mapping):
            empty = {key: _empty(value) for key, value in reward.items()}
            scored = self.keys or {"score"} & empty.keys()
            stand_in = {**empty, **dict.fromkeys(scored, score)}
        elif type(reward) in (list, tuple):
            stand_in = type(reward)(score if _is_number(value) else _empty(value) for value in reward)
        elif self.keys:
            stand_in = dict.fromkeys(self.keys, score)
        self.anchors.shapes[source] = dumps(stand_in)

    async def _stand_in(self, source: str) -> Any:
        """Returns the stand-in of ``source``. Waits for the first reward of ``source`` if running executions may give it."""
        shapes = self.anchors.shapes
        give_up_at = time.monotonic() + self.shape_seconds
        while source not in shapes and source not in self._without_shape:
            await self.exchange()
            if not (self.anchors.running or self.anchors.running_elsewhere) or time.monotonic() > give_up_at:
                self._without_shape.add(source)
            elif source not in shapes:
                await asyncio.sleep(_POLL_SECONDS)
        if source not in shapes and not shapes:
            return dict.fromkeys(self.keys, self.flags.timeout_score) if self.keys else self.flags.timeout_score
        return pickle.loads(shapes.get(source, next(iter(shapes.values()))))

    def _warn(self, source: str, kind: str, text: str) -> None:
        if (source, kind) not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add((source, kind))
            logger.warning("rl-accel: %s", text)


def _rewards(result: ExecutionResult, size: int | None) -> list[Any]:
    """Returns the rewards in ``result``: its value if ``size`` is None, else the items of the list that the grader returned.

    Returns [] if the grader returned no list.
    """
    if size is None:
        return [result.value]
    if isinstance(result.value, Collection) and not isinstance(result.value, str | bytes | Mapping):
        with contextlib.suppress(TypeError):  # an array of dimension 0
            return list(result.value)
    return []


def _number_in(reward: Any, keys: Sequence[str]) -> float | None:
    if isinstance(reward, Mapping):
        reward = next((reward[key] for key in keys if key in reward), None)
    if reward is None or isinstance(reward, str | bytes):
        return None
    try:
        return float(reward)
    except Exception:  # such as a tensor of several numbers, or a warning that the grader has turned into an error
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _empty(value: Any) -> Any:
    """Returns an empty value for a stand-in, of the same type as ``value``, such as 0 or ""; None if there is no such value."""
    if type(value) in _PLAIN or isinstance(value, np.number | np.bool_):
        return type(value)()
    if isinstance(value, str):
        return ""
    if isinstance(value, numbers.Number) or hasattr(value, "dtype"):
        with contextlib.suppress(Exception):
            return value * 0  # verl averages such values
    return None
