"""Adaptive pauses between polls for finished rollouts: short delays at a bounded CPU cost."""

import math
from collections import deque
from statistics import median_low

_WINDOW_S = 10.0
_REMEMBERED_POLLS = 5
_CONVINCING_POLLS = 3
_EAGER_FRACTION = 0.25


class AdaptiveWait:
    """Decides the pause between two polls for finished responses. Takes times as arguments and has no clock.

    Two bounds conflict:

    - Cost: a poll takes ``cost`` seconds. Pauses of ``cost * (1 / max_cpu_share - 1)`` seconds keep polling at
      ``max_cpu_share`` of one core.
    - Delay: a response that arrives just after a poll waits for the end of the next poll, at most ``max_delay_s``.

    Both bounds hold if a poll takes at most ``max_cpu_share * max_delay_s`` seconds (1 ms by default). If a poll takes longer, but
    at most a quarter of ``max_delay_s``, the delay bound still holds while saved CPU time is left. CPU time is saved when no
    polls run (during a training step), at most ``max_cpu_share * 10`` seconds. Without saved CPU time, and for even longer
    polls, only the cost bound holds. Over any ``t`` seconds, polling thus costs at most ``max_cpu_share * (t + 10)`` seconds
    plus one poll. The framework's own pause is the argument ``longest`` of :meth:`next_wait`. A pause exceeds ``longest`` only
    if at least three polls have shown that pauses of ``longest`` seconds would cost more than ``max_cpu_share``.

    Near the end of a rollout, at most an eighth of the prompts is unfinished. A poll that then shows a change shortens the pause
    to a quarter of ``max_delay_s``. The pause then doubles with each poll that shows no change, up to ``max_delay_s``. Pauses are
    longer if saved CPU time does not suffice for them.

    Args:
        max_cpu_share: maximum share of one core for polling, in (0, 1].
        max_delay_s: maximum seconds between the arrival of a response and the end of the poll that finds it; positive.

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
        """Duration of a poll in seconds: the median of recent polls, so that a single outlier has no effect."""
        return median_low(self._costs) if self._costs else 0.0

    def next_wait(self, now: float, poll_s: float, outstanding: int, settled: int, longest: float) -> float:
        """Returns the seconds to pause between the last poll and the next poll.

        Args:
            now: monotonic time in seconds at the end of the poll.
            poll_s: duration of the poll in seconds.
            outstanding: number of prompts that the poll showed as unfinished.
            settled: number of prompts that the poll showed as finished or failed.
            longest: maximum pause in seconds. A longer pause is returned only if at least three polls were seen and pauses of
                ``longest`` seconds would cost more than ``max_cpu_share``.
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
