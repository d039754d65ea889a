"""Adaptive pauses between polls for finished rollouts: short delays at a bounded CPU cost."""

import math
from collections import deque
from statistics import median_low

_WINDOW_S = 10.0
_REMEMBERED_POLLS = 5
_CONVINCING_POLLS = 3
_EAGER_FRACTION = 0.25


class AdaptiveWait:
    """Decides the pause between two polls of a trainer for finished responses. Takes times as arguments and has no clock.

    There are two goals. Delay: a poll should find a finished response within ``max_delay_s`` seconds. CPU: polls should use at most
    ``max_cpu_share`` of one core. The duration of a poll decides which goal counts:

    - Up to ``max_cpu_share * max_delay_s`` seconds (1 ms by default): both goals can be reached.
    - Up to ``max_delay_s / 4`` seconds (5 ms by default): the delay goal, while a budget of CPU time lasts; then the CPU goal. The
      budget grows by ``max_cpu_share`` seconds each second, up to ``max_cpu_share * 10`` seconds.
    - Longer: the CPU goal.

    Over any ``t`` seconds, polls thus use at most ``max_cpu_share * (t + 10)`` seconds plus one poll. The first two polls may be
    slow by exception; the pauses after them are never longer than the framework's own pause.

    Pauses are shorter near the end of a rollout. If at most an eighth of the prompts is unfinished and their number has changed
    since the last poll, the next pause is a quarter of ``max_delay_s``. Every other poll doubles the pause, up to ``max_delay_s``.

    Args:
        max_cpu_share: maximum share of one core for polling, in (0, 1].
        max_delay_s: desired maximum of the seconds from the end of a response to the end of the poll that finds it; positive.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, max_cpu_share: float = 0.05, max_delay_s: float = 0.02) -> None:
        if not 0 < max_cpu_share <= 1:
            raise ValueError(f"max_cpu_share must be in (0, 1], found {max_cpu_share!r}")
        if not 0 < max_delay_s < math.inf:
            raise ValueError(f"max_delay_s must be positive and finite, found {max_delay_s!r}")
        self.max_cpu_share = max_cpu_share
        self.max_delay_s = max_delay_s
        self._costs: deque[float] = deque(maxlen=_REMEMBERED_POLLS)
        self._savings = max_cpu_share * _WINDOW_S
        self._last: float | None = None
        self._counts: tuple[int, int] | None = None
        self._eager_s = max_delay_s

    @property
    def cost(self) -> float:
        """Typical duration of a poll in seconds: the median of the last five polls."""
        return median_low(self._costs) if self._costs else 0.0

    def next_wait(self, now: float, poll_s: float, outstanding: int, settled: int, longest: float) -> float:
        """Returns the seconds to pause between the last poll and the next poll.

        Args:
            now: monotonic time in seconds at the end of the last poll.
            poll_s: duration of the last poll in seconds.
            outstanding: number of prompts that the poll showed as unfinished.
            settled: number of prompts that the poll showed as finished or failed.
            longest: seconds that the framework itself would pause. Only from the third poll on can the result be longer.
        """
        self._costs.append(max(poll_s, 0.0))
        earned = 0.0 if self._last is None else self.max_cpu_share * max(now - self._last, 0.0)
        self._last = now
        cost = self.cost
        limit = self.max_cpu_share * _WINDOW_S
        self._savings = max(min(self._savings + earned, limit) - cost, -limit)
        cheap = cost <= _EAGER_FRACTION * self.max_delay_s
        wanted = self._wanted(cost, outstanding, settled)
        affordable = cost * (1 / self.max_cpu_share - 1)
        if cheap:
            # A shorter pause is allowed if saved CPU time covers the next poll. A pause of `affordable` always saves enough.
            short = cost - self._savings - self.max_cpu_share * cost
            affordable = min(affordable, max(short, 0.0) / self.max_cpu_share)
        ceiling = max(longest, affordable) if len(self._costs) >= _CONVINCING_POLLS else longest
        return min(max(wanted, affordable), ceiling)

    def _wanted(self, cost: float, outstanding: int, settled: int) -> float:
        changed = self._counts is not None and self._counts != (outstanding, settled)
        self._counts = outstanding, settled
        if changed and 8 * outstanding <= outstanding + settled:
            self._eager_s = _EAGER_FRACTION * self.max_delay_s
        else:
            self._eager_s = min(2 * self._eager_s, self.max_delay_s)
        return max(self._eager_s - cost, _EAGER_FRACTION * self.max_delay_s)
