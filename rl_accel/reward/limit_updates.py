"""Changes the time limits of an execution that is running."""

import contextlib
from collections.abc import Callable, Iterator

SetLimits = Callable[[float, float], None]
"""Takes new limits: wall and processor seconds, both from the start of the execution."""


class LimitUpdates:
    """Passes new limits from the policy to whoever enforces them. One published before anybody has subscribed is kept."""

    def __init__(self) -> None:
        self._latest: tuple[float, float] | None = None
        self._set_limits: SetLimits | None = None

    def publish(self, wall: float, cpu: float) -> None:
        """Let the execution have ``wall`` and ``cpu`` seconds in all. Without a subscriber it is only kept."""
        if self._latest != (wall, cpu):
            self._latest = wall, cpu
            if self._set_limits is not None:
                self._set_limits(wall, cpu)

    @contextlib.contextmanager
    def subscribed(self, set_limits: SetLimits) -> Iterator[None]:
        """Within the block, have ``set_limits`` called for what is published, and at once for the latest of before."""
        self._set_limits = set_limits
        try:
            if self._latest is not None:
                set_limits(*self._latest)
            yield
        finally:
            self._set_limits = None
