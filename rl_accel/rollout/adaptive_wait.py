"""Adaptive pauses between polls for finished rollouts: short delays at a bounded CPU cost."""

from collections import deque
from statistics import median_low


class AdaptiveWait:
    """Decides the pause between two polls of a trainer for finished responses. Has no clock.

    The pause is ``max_delay_s``, or longer if polls would otherwise use more than ``max_cpu_share`` of one core. It is never longer
    than the framework's own pause.

    Args:
        max_cpu_share: maximum share of one core for polling, in (0, 1].
        max_delay_s: seconds of a pause while polls are cheap.
    """

    def __init__(self, max_cpu_share: float = 0.05, max_delay_s: float = 0.02) -> None:
        self._max_cpu_share = max_cpu_share
        self._max_delay_s = max_delay_s
        self._costs: deque[float] = deque([0.0], maxlen=5)

    @property
    def cost(self) -> float:
        """Typical duration of a poll in seconds: the median of the last five polls, so that one slow poll does not count."""
        return median_low(self._costs)

    def next_wait(self, poll_s: float, longest: float) -> float:
        """Returns the seconds to pause after a poll that took ``poll_s`` seconds. ``longest`` is the framework's own pause."""
        self._costs.append(max(poll_s, 0.0))
        affordable = self.cost * (1 / self._max_cpu_share - 1)
        return min(max(self._max_delay_s, affordable), longest)
