"""What an execution may use, and what came of it."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal

Verdict = Literal["passed", "wrong", "done", "error", "timeout", "memory", "killed"]
"""passed, wrong: of a program. done: a grader returned. error: it raised, or ended without a result. killed: it was stopped for a
limit other than time or memory, ended a grader without returning, or took two workers with it."""
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


@dataclass(frozen=True)
class Limits:
    """What one execution may use.

    Args:
        wall: seconds from start to end, less those in which it was ready and had to wait for a processor.
        cpu: seconds of processor time, all its processes together.
        memory: bytes of address space of each process, beyond what the worker has, and of resident memory of all together.
        processes: how many there may be at once, threads included.
        file_bytes: size of a file it writes.
        output_bytes: what it may print; more stops it. Only the beginning is returned.
        updates: changes ``wall`` and ``cpu`` while it runs.

    Raises:
        ValueError: a limit is not above 0.
    """

    wall: float = 30.0
    cpu: float = 30.0
    memory: int = 1 << 30
    processes: int = 32
    file_bytes: int = 64 << 20
    output_bytes: int = 1 << 20
    updates: LimitUpdates = field(default_factory=LimitUpdates, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in self.numbers().items():
            if not value > 0:
                raise ValueError(f"{name} must be above 0, found {value!r}")

    def numbers(self) -> dict[str, float]:
        """Return all limits by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "updates"}


@dataclass(frozen=True)
class ExecutionResult:
    """What came of an execution.

    Attributes:
        verdict: see :data:`Verdict`.
        value: what a grader returned; None unless the verdict is "done".
        wall, cpu: seconds it took, of all its processes.
        waited: seconds of ``wall`` in which it was ready and had no processor; of several threads, of the one that waited most, and
            no more than ``wall - cpu``. 0 where the kernel does not tell.
        reason: in a few words: the exception, the limit that it exceeded.
        output: the beginning of what a program printed.
    """

    verdict: Verdict
    value: Any = None
    wall: float = 0.0
    cpu: float = 0.0
    waited: float = 0.0
    reason: str = ""
    output: str = ""
