"""Changes the time limits of an execution that is running."""

import contextlib
from collections.abc import Callable, Iterator

Tell = Callable[[float, float], None]
"""Is told new limits: wall and processor seconds, both from the start of the execution."""


class Leash:
    """Between one who learns and one who watches: what the first gives is told to the second, now or when it begins."""

    def __init__(self) -> None:
        self._given: tuple[float, float] | None = None
        self._tell: Tell | None = None

    def give(self, wall: float, cpu: float) -> None:
        """Let the execution have ``wall`` and ``cpu`` seconds in all. Nothing happens where nobody follows."""
        if self._given != (wall, cpu):
            self._given = wall, cpu
            if self._tell is not None:
                self._tell(wall, cpu)

    @contextlib.contextmanager
    def followed(self, tell: Tell) -> Iterator[None]:
        """Have ``tell`` called within the block for what is given, and at once for what was."""
        self._tell = tell
        try:
            if self._given is not None:
                tell(*self._given)
            yield
        finally:
            self._tell = None
