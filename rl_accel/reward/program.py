"""What is to be executed, what it may use, and what came of it."""

import json
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from rl_accel.reward.limit_updates import LimitUpdates

Verdict = Literal["passed", "wrong", "error", "timeout", "memory", "killed"]
"""wrong: it ran, and the answer is another. error: it raised, or ended before it was judged. killed: stopped for a limit other than
time or memory, or because nobody wants the result any more."""
GradeVerdict = Literal["done", "error", "timeout", "killed"]
"""done: it returned. error: it raised, or its value cannot be sent. killed: it ended without returning, was stopped for a limit
other than time, or took two workers with it."""
Kind = Literal["stdin", "assert", "call", "pytest"]
KINDS = ("stdin", "assert", "call", "pytest")


@dataclass(frozen=True)
class Case:
    """One test case of a program.

    ``stdin``: the program is run with ``given`` as its input, and what it prints must be ``expected``, trailing white space aside.
    ``assert``: ``given`` is Python code, run after the program in its namespace; any exception is wrong, an AssertionError or not.
    ``call``: ``given`` is JSON, ``[name, arguments]``; the function's value, as JSON, must equal ``expected``, JSON too.
    ``pytest``: ``given`` is a test file; the program is ``solution.py`` beside it.

    Raises:
        ValueError: the kind is unknown, or JSON was wanted.
    """

    kind: Kind
    given: str
    expected: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, found {self.kind!r}")
        if self.kind == "call":
            try:
                name, arguments = json.loads(self.given)
                json.loads(self.expected)
            except (ValueError, TypeError) as error:
                raise ValueError(f"a call wants JSON, [name, arguments] and the value expected: {error}") from error
            if not isinstance(name, str) or not isinstance(arguments, list):
                raise ValueError(f"a call wants [name, arguments], found {self.given!r}")


@dataclass(frozen=True)
class Limits:
    """What one case may use.

    Args:
        wall: seconds from start to end, less those that it was ready and had to wait for a processor.
        cpu: seconds of processor time, all its processes together.
        memory: bytes of address space of each process, beyond what the worker has, and of resident memory of all together.
        processes: how many there may be at once, threads included.
        file_bytes: size of a file it writes.
        output_bytes: what it may print; more stops it. Only the beginning is returned.
        updates: changes ``wall`` and ``cpu`` while it runs; None: they stay.
    """

    wall: float = 30.0
    cpu: float = 30.0
    memory: int = 1 << 30
    processes: int = 32
    file_bytes: int = 64 << 20
    output_bytes: int = 1 << 20
    updates: LimitUpdates | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in self.numbers().items():
            if not value > 0:
                raise ValueError(f"{name} must be above 0, found {value!r}")

    def numbers(self) -> dict[str, float]:
        """Return all limits by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "updates"}


@dataclass(frozen=True)
class CaseResult:
    """What came of a case.

    Attributes:
        verdict: see :data:`Verdict`.
        wall, cpu: seconds it took, of all its processes.
        output: the beginning of what it printed.
        reason: in a few words: the exception, the limit that struck.
        waited: seconds of ``wall`` that it was ready and had no processor; of several threads, of the one that waited most, and no
            more than ``wall - cpu``. 0 where the kernel does not tell.
    """

    verdict: Verdict
    wall: float = 0.0
    cpu: float = 0.0
    output: str = ""
    reason: str = ""
    waited: float = 0.0


@dataclass(frozen=True)
class GradeResult:
    """What came of a call of a grader.

    Attributes:
        value: what it returned; None unless the verdict is "done".
        verdict: see :data:`GradeVerdict`.
        wall, cpu, waited: seconds, as in :class:`CaseResult`.
        reason: in a few words: the exception, the limit that struck.
    """

    value: Any
    verdict: GradeVerdict
    wall: float = 0.0
    cpu: float = 0.0
    waited: float = 0.0
    reason: str = ""
