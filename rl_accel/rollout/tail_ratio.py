"""How long prompts take to complete, seen through rounds that cut the slow ones off, and the surplus that pays best."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]
_GRID = 200
_CANDIDATES = 32
_GOOD_ENOUGH = 1.01


class CompletionTimes:
    """Completion times of prompts, from launch until R0 responses are scored, and what follows from them.

    **What is observed.** In a short round a prompt completes after ``x`` seconds, or is cut off after ``c`` and is only
    known to take longer. The Kaplan-Meier estimator turns both into a distribution F that is right up to the longest
    time observed; where the round stops depends on nothing but times already seen, which is what the estimator needs.
    The mass beyond it gets the shape of the times in long rounds that are longer still. This holds whether a prompt was
    cut off because it is long by nature (its second attempt is long as well) or by bad luck (its second attempt is
    ordinary, and only the longest of those are taken). A long round launches no surplus of responses; the time at which
    R0 of r would have been there is read from its R0 responses at the same quantile, rank R0 * (R0 + 1) / (r + 1).

    **What is minimised.** A short round with n prompts lasts S(n), the mean of the P0-th smallest of n draws from F, and
    defers n - P0 prompts. Each of these costs 1/P0 of a long round, whose mean length L is that of the largest of P0
    draws from the times seen in long rounds. In the end all n are trained, so a trained prompt costs

        (S(n) + (n - P0) / P0 * L) / n

    seconds of rollout. Training and weight updates cost the same for any n. Of the ratios n / P0 within 1% of the best,
    the smallest is taken: it wastes the fewest tokens.

    **What is left out.** Generation slows down with more prompts at once; times observed at one ratio are taken to hold
    at another. L is taken not to depend on n, although the prompts deferred at a small ratio are longer. Both errors
    shrink as the ratio settles, because it is chosen again before each round.

    Remembered are the latest prompts of either kind of round: 16 batches, but at least 256 and at most 4096.

    Args:
        prompts_per_step: P0.
    """

    def __init__(self, prompts_per_step: int) -> None:
        self.prompts_per_step = prompts_per_step
        window = min(max(256, 16 * prompts_per_step), 4096)
        self._short: deque[tuple[float, bool]] = deque(maxlen=window)
        self._long: deque[tuple[float, float]] = deque(maxlen=window)

    def add_short(self, seconds: float, completed: bool) -> None:
        """A prompt completed in a short round, or had not completed after this time."""
        self._short.append((_rounded(seconds), completed))

    def add_long(self, seconds: float, with_surplus: float) -> None:
        """A deferred prompt completed in a round that waits for all.

        Args:
            seconds: until the last of its R0 responses was scored.
            with_surplus: the time it would have taken with a short round's surplus of responses.
        """
        self._long.append((_rounded(seconds), _rounded(with_surplus)))

    def full_wait(self) -> float | None:
        """Return the expected seconds until all of P0 prompts are complete; ``None`` while the tail is unknown.

        It is known once P0 prompts were seen in short rounds, and either none was cut off or P0 were seen in long rounds.
        """
        wanted = self.prompts_per_step
        tail_is_known = len(self._long) >= wanted or all(completed for _, completed in self._short)
        if len(self._short) < wanted or not tail_is_known:
            return None
        return _mean_order_statistic(*self._distribution(), wanted, wanted)

    def best_ratio(self, default: float, limit: float = 2.0) -> float:
        """Return the ratio n / P0 in [1, limit] with the least expected seconds per trained prompt.

        Args:
            default: returned until a first long round has shown the tail.
            limit: the largest ratio to consider; key-value cache memory grows with it.
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
        """Return the remembered times, ready for JSON."""
        return {"short": [list(pair) for pair in self._short], "long": [list(pair) for pair in self._long]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the times of an earlier run.

        Raises:
            KeyError, TypeError, ValueError: this is not what ``state_dict`` returns.
        """
        self._short.extend((float(seconds), bool(done)) for seconds, done in state["short"])
        self._long.extend((float(seconds), float(with_surplus)) for seconds, with_surplus in state["long"])

    def _distribution(self) -> tuple[_Floats, _Floats]:
        """F as its sorted points and the cumulative probability at each."""
        seconds, done = _columns(self._short)
        # At equal times a prompt that completed comes first: the one cut off takes longer than that.
        order = np.lexsort((done == 0, seconds))
        seconds, done = seconds[order], done[order] == 1
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
    """To microseconds, so that a saved state is short."""
    return round(max(seconds, 0.0), 6)


def _columns(pairs: Iterable[tuple[float, float]]) -> _Floats:
    """``pairs`` as an array [2, N]."""
    return np.fromiter(chain.from_iterable(pairs), np.float64).reshape(-1, 2).T


def _mean_order_statistic(points: _Floats, cumulative: _Floats, k: int, n: int) -> float:
    """Return the mean of the ``k``-th smallest of ``n`` draws from a discrete distribution (its sorted points, and F there)."""
    quantiles, weights = _order_statistic(k, n)
    at = np.searchsorted(cumulative, quantiles)
    return float(weights @ points[np.minimum(at, len(points) - 1)])


@lru_cache(maxsize=512)
def _order_statistic(k: int, n: int) -> tuple[_Floats, _Floats]:
    """Quantiles of F, and how likely the ``k``-th smallest of ``n`` draws lies at each.

    The k-th smallest of n uniform numbers follows Beta(k, n - k + 1); its density is integrated over the quantile
    function on a grid of eight standard deviations to either side.
    """
    a, b = k, n - k + 1
    mean = a / (a + b)
    deviation = math.sqrt(mean * (1 - mean) / (a + b + 1))
    low, high = max(0.0, mean - 8 * deviation), min(1.0, mean + 8 * deviation)
    quantiles = low + (np.arange(_GRID) + 0.5) * (high - low) / _GRID
    logarithms = (a - 1) * np.log(quantiles) + (b - 1) * np.log1p(-quantiles)
    weights = np.exp(logarithms - logarithms.max())
    return quantiles, weights / weights.sum()
