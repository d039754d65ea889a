"""Estimates completion times of prompts from rounds that cut off slow prompts, and chooses the number of prompts to start."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]
_GRID = 200  # number of points at which a Beta distribution is evaluated
_CANDIDATES = 32  # most ratios that are compared
_GOOD_ENOUGH = 1.01


class CompletionTimes:
    """Estimates completion times of prompts, and chooses the ratio of started to trained prompts with the lowest cost.

    P0 is the number of prompts in a batch, R0 the number of trained responses per prompt. The completion time of a prompt is the
    time from launch until R0 responses are scored. A short round starts n >= P0 prompts and ends when P0 prompts are complete. The
    other prompts are deferred to a long round, which waits for all responses. The prompt ratio is n / P0.

    **Observations.** In a short round, a prompt either completes after ``x`` seconds or is cut off after ``c`` seconds, so that it
    takes longer than ``c``. The Kaplan-Meier estimator turns both kinds of observations into a distribution F, valid up to the
    longest completion time ``m`` of short rounds. The rest of F, beyond ``m``, is spread like the completion times above ``m`` in
    long rounds, which run deferred prompts once more.

    A short round starts r responses per prompt and waits for R0 of them. A long round starts only R0, so its times are converted.
    On average, the R0-th of r random draws is at quantile R0 / (r + 1), and the k-th of R0 draws at k / (R0 + 1). Both are equal if
    k = R0 * (R0 + 1) / (r + 1). The time at which k responses were scored is the estimate for r responses.

    **Objective.** A short round with n prompts lasts S(n) seconds, the mean of the P0-th smallest of n draws from F. It defers
    n - P0 prompts, and each deferred prompt costs 1/P0 of a long round. A long round lasts L seconds, the mean of the largest of P0
    draws from the times of long rounds. All n prompts are trained in the end, so a trained prompt costs

        (S(n) + (n - P0) / P0 * L) / n

    seconds of rollout. The result is the smallest ratio n / P0 whose cost is within 1% of the lowest cost, because a small ratio
    wastes fewer tokens.

    **Simplifications.** Times observed at one ratio are assumed to hold at another, and L not to depend on n. Both errors shrink as
    the ratio converges, because it is chosen again before each round.
    """

    def __init__(self, prompts_per_step: int) -> None:
        self.prompts_per_step = prompts_per_step
        window = min(
            max(256, 16 * prompts_per_step), 4096
        )  # latest prompts that are kept of each kind of round; by hand
        self._short: deque[tuple[float, bool]] = deque(maxlen=window)
        self._long: deque[tuple[float, float]] = deque(maxlen=window)

    def add_short(self, seconds: float, completed: bool) -> None:
        """Adds a prompt of a short round, which cuts off slow prompts.

        ``seconds`` after its launch, the prompt was ``completed`` or else cut off.
        """
        self._short.append((_rounded(seconds), completed))

    def add_long(self, seconds: float, with_surplus: float) -> None:
        """Adds a deferred prompt that was complete in a long or final round, ``seconds`` after its launch.

        ``with_surplus`` are the estimated seconds in a short round, which starts more responses than it waits for.
        """
        self._long.append((_rounded(seconds), _rounded(with_surplus)))

    def full_wait(self) -> float | None:
        """Returns the expected seconds of a round that starts one batch of prompts and waits for all of them; None if unknown.

        Known once short rounds have shown the times of a batch of prompts. If one of these was deferred, long rounds must have
        shown the times of a batch of prompts, too.
        """
        wanted = self.prompts_per_step
        tail_is_known = len(self._long) >= wanted or all(completed for _, completed in self._short)
        if len(self._short) < wanted or not tail_is_known:
            return None
        return _mean_order_statistic(*self._distribution(), wanted, wanted)

    def best_ratio(self, default: float, limit: float = 2.0) -> float:
        """Returns the ratio of started to trained prompts, in [1, limit], with the lowest expected seconds per trained prompt.

        Returns ``default`` until short rounds and long rounds have each shown the times of a batch of prompts.
        """
        wanted = self.prompts_per_step
        if min(len(self._long), len(self._short)) < wanted:
            return default
        times, cumulative = self._distribution()
        tail = np.sort(_columns(self._long)[0])
        equal = np.arange(1, len(tail) + 1) / len(tail)
        long_round = _mean_order_statistic(tail, equal, wanted, wanted)
        most = max(wanted, math.floor(limit * wanted))
        step = max(1, math.ceil((most - wanted) / _CANDIDATES))
        costs = {
            n: (_mean_order_statistic(times, cumulative, wanted, n) + (n - wanted) / wanted * long_round) / n
            for n in range(wanted, most + 1, step)
        }
        bound = _GOOD_ENOUGH * min(costs.values())
        return next(n for n, cost in costs.items() if cost <= bound) / wanted

    def state_dict(self) -> dict[str, Any]:
        """Returns the observed completion times as JSON-compatible data."""
        return {"short": [list(pair) for pair in self._short], "long": [list(pair) for pair in self._long]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Adds the completion times in ``state``, which an earlier run got from :meth:`state_dict`."""
        self._short.extend((float(seconds), bool(done)) for seconds, done in state["short"])
        self._long.extend((float(seconds), float(with_surplus)) for seconds, with_surplus in state["long"])

    def _distribution(self) -> tuple[_Floats, _Floats]:
        """Returns the distribution of completion times: sorted seconds, and the cumulative probability at each of them."""
        seconds, done = _columns(self._short)
        # At equal times, completed prompts come first: a prompt that was cut off takes longer than this time.
        order = np.lexsort((done == 0, seconds))
        seconds, done = seconds[order], done[order] == 1
        # Kaplan-Meier, which requires that the end of a round depends only on times already seen
        at_risk = np.arange(len(seconds), 0, -1)
        left = np.cumprod(np.where(done, 1 - 1 / at_risk, 1.0))
        points, cumulative = seconds[done], 1 - left[done]
        last = points[-1] if len(points) else 0.0
        with_surplus = _columns(self._long)[1]
        beyond = np.sort(with_surplus[with_surplus > last])
        if not len(beyond):
            beyond = seconds[-1:]
        share = np.arange(1, len(beyond) + 1) / len(beyond)
        return np.append(points, beyond), np.append(cumulative, 1 - left[-1] * (1 - share))


def _rounded(seconds: float) -> float:
    """Rounds seconds to microseconds. Negative seconds become 0."""
    return round(max(seconds, 0.0), 6)


def _columns(pairs: Iterable[tuple[float, float]]) -> _Floats:
    """Returns N pairs as an array of shape [2, N]."""
    return np.fromiter(chain.from_iterable(pairs), np.float64).reshape(-1, 2).T


def _mean_order_statistic(points: _Floats, cumulative: _Floats, k: int, n: int) -> float:
    """Returns the mean of the ``k``-th smallest of ``n`` draws from a distribution in the form of ``_distribution``."""
    quantiles, weights = _order_statistic(k, n)
    at = np.searchsorted(cumulative, quantiles)
    return float(weights @ points[np.minimum(at, len(points) - 1)])


@lru_cache(maxsize=512)
def _order_statistic(k: int, n: int) -> tuple[_Floats, _Floats]:
    """Returns quantiles (0 to 1) at which the ``k``-th smallest of ``n`` random draws may lie, and the probability of each."""
    a, b = k, n - k + 1  # the quantile follows Beta(a, b)
    mean = a / (a + b)
    deviation = math.sqrt(mean * (1 - mean) / (a + b + 1))
    low, high = max(0.0, mean - 8 * deviation), min(1.0, mean + 8 * deviation)
    quantiles = low + (np.arange(_GRID) + 0.5) * (high - low) / _GRID
    logarithms = (a - 1) * np.log(quantiles) + (b - 1) * np.log1p(-quantiles)
    weights = np.exp(logarithms - logarithms.max())
    return quantiles, weights / weights.sum()
