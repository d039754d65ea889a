"""Changes that are not to be tried for a while, longer each time."""

from collections.abc import Mapping, Sequence
from typing import Any

from rl_accel.parallel.tp_saved import whole

_LONGEST = 2**20


class Holds:
    """Until which step a change from one size to another is held back.

    Args:
        steps: of the first hold; each later one of the same change is twice as long.
    """

    def __init__(self, steps: int, held: Mapping[tuple[int, int], tuple[int, int]] | None = None) -> None:
        self._steps = steps
        self._held = dict(held or {})

    def add(self, source: int, target: int, now: int) -> None:
        """Hold the change back from step ``now`` on."""
        _, times = self._held.get((source, target), (0, 0))
        self._held[source, target] = now + min(self._steps * 2 ** min(times, 20), _LONGEST), times + 1

    def left(self, source: int, target: int, now: int) -> int:
        """Return the steps until the change may be tried."""
        return max(0, self._held.get((source, target), (0, 0))[0] - now)

    def state_dict(self) -> list[list[int]]:
        """Return the holds, ready for JSON."""
        return [[*change, *hold] for change, hold in self._held.items()]

    @classmethod
    def restored(cls, steps: int, state: Sequence[Any]) -> "Holds":
        """Return what ``state_dict`` saved.

        Raises:
            TypeError, ValueError: this is not what ``state_dict`` returns.
        """
        held = {}
        for source, target, until, times in state:
            held[whole(source, 1), whole(target, 1)] = whole(until), whole(times, 1)
        return cls(steps, held)
