"""How long to wait before looking again whether rollouts have finished: short delays at a bounded cost."""

import math
from collections import deque
from statistics import median_low

_WINDOW_S = 10.0
_REMEMBERED_POLLS = 5
_CONVINCING_POLLS = 3
_EAGER_FRACTION = 0.25


class AdaptiveWait:
    """Decides the pause between two polls. Takes times, never a clock, so that it can be driven by tests.

    Two bounds pull against each other:

    - a poll costs ``cost`` seconds, so pauses of ``cost * (1 / max_cpu_share - 1)`` keep the share of one core at
      ``max_cpu_share``;
    - a response that comes in just after a poll waits for the next one, at most ``max_delay_s``, the poll included.

    Where both can be had (a poll costs at most ``max_cpu_share * max_delay_s``, 1 ms by default) both hold. A dearer
    poll of up to a quarter of ``max_delay_s`` may be repeated every ``max_delay_s`` out of savings: time in which
    nothing was polled (a training step) earns them, up to what 10 seconds of polling at ``max_cpu_share`` cost. Past
    that, and for still dearer polls from the start, the cost bound alone holds. Over any stretch of ``t`` seconds
    polling thus costs at most ``max_cpu_share * (t + 10)`` seconds and one poll. Pauses go beyond ``longest``, the pause
    that would be made without us, only where several polls in a row showed that it would cost more than the share.

    Near the end, when few prompts are outstanding and some have just settled, pauses start at a quarter of
    ``max_delay_s`` and double until nothing more changes, as far as savings allow.

    Args:
        max_cpu_share: share of one core, in (0, 1].
        max_delay_s: seconds, positive.

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
        """Seconds a poll takes: the median of recent ones, so that one hiccup is not taken for a trend."""
        return median_low(self._costs) if self._costs else 0.0

    def next_wait(self, now: float, poll_s: float, outstanding: int, settled: int, longest: float) -> float:
        """Return the seconds to pause after a poll.

        Args:
            now: any monotonic time, at the end of the poll.
            poll_s: seconds the poll took.
            outstanding: prompts that the poll showed as not finished.
            settled: prompts that it showed as finished or failed.
            longest: the most to return, in seconds, unless polls are known to be too dear for it.
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
            # The next poll must be paid by what is saved then; a pause of `affordable` always earns it.
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
