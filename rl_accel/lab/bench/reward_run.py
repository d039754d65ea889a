"""Executes a workload in both arms of ``rl-accel bench reward``, batch by batch in turns, and says what came of it."""

import asyncio
import contextlib
import ctypes
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rl_accel.lab.bench.reward_workload import ANSWER, CASE, Response, program
from rl_accel.reward.adaptive_timeout import TimeoutSettings
from rl_accel.reward.anchor_store import Replica
from rl_accel.reward.limited_executor import LimitedExecutor, execute_program
from rl_accel.reward.program import CaseResult
from rl_accel.reward.sandbox import Sandbox

_SUBREAPER = 36
_END_SECONDS = 2.0


class WrongResult(Exception):
    """An execution ended as it must not, or left something behind."""


@dataclass
class Arm:
    """What one arm did.

    Attributes:
        results: of each batch, in the order of its responses.
        makespans: seconds from the start of each batch until its last result.
        counts: the executor's.
    """

    results: list[list[CaseResult]] = field(default_factory=list)
    makespans: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


async def run_arms(
    batches: Sequence[Sequence[Response]], policies: Mapping[str, TimeoutSettings], slots: int, isolation: str | None
) -> dict[str, Arm]:
    """Execute every batch under each policy, one after the other, all responses of a batch at once.

    Raises:
        WrongResult: see :func:`check`.
    """
    arms = {name: Arm() for name in policies}
    async with contextlib.AsyncExitStack() as stack:
        executors = {name: LimitedExecutor(Replica(settings), slots) for name, settings in policies.items()}
        sandboxes = {name: await stack.enter_async_context(_open(slots, isolation)) for name in policies}
        for number, batch in enumerate(batches):
            for name in list(policies)[:: -1 if number % 2 else 1]:  # neither is always the first
                began = time.monotonic()
                found = await asyncio.gather(
                    *(execute_program(executors[name], sandboxes[name], r.prompt, r.code, [CASE]) for r in batch)
                )
                arms[name].makespans.append(time.monotonic() - began)
                arms[name].results.append([result for (result,) in found])
                arms[name].counts.update(executors[name].replica.take_delta().counts)
                check(batch, arms[name].results[-1])
    return arms


def check(batch: Sequence[Response], results: Sequence[CaseResult]) -> None:
    """Compare verdicts with what the programs do. A program that ends may have been stopped; that is counted, not wrong.

    Raises:
        WrongResult: a program that never ends was not stopped, or one that does has another verdict than it earned.
    """
    for response, result in zip(batch, results, strict=True):
        earned = "passed" if response.correct else "wrong"
        allowed = ("timeout",) if response.seconds is None else (earned, "timeout")
        if result.verdict not in allowed:
            raise WrongResult(
                f"wanted {' or '.join(allowed)}, found {result.verdict} ({result.reason}):\n{response.code}"
            )


async def check_verdicts(settings: TimeoutSettings, slots: int, isolation: str | None) -> int:
    """Execute programs whose verdicts are known, and return how many.

    Raises:
        WrongResult: a verdict is another.
    """
    known = {
        program("sleep", 0.01, ANSWER): ("passed", ""),
        program("busy", 0.01, ANSWER): ("passed", ""),
        program("sleep", 0.01, "41"): ("wrong", ""),
        "raise ValueError(1)": ("error", "ValueError: 1"),
        "import os; os._exit(3)": ("error", ""),
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + program("sleep", None, ANSWER): ("timeout", "wall"),
        program("busy", None, ANSWER): ("timeout", ""),
        "import os\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\nwhile True:\n    pass": ("timeout", ""),
    }  # fmt: skip
    async with _open(slots, isolation) as sandbox:
        executor = LimitedExecutor(Replica(settings), slots)
        found = await asyncio.gather(*(execute_program(executor, sandbox, code, code, [CASE]) for code in known))
    for (code, (verdict, reason)), (result,) in zip(known.items(), found, strict=True):
        if result.verdict != verdict or not result.reason.startswith(reason):
            raise WrongResult(f"wanted {verdict} {reason}, found {result.verdict} {result.reason}:\n{code}")
    return len(known)


async def measure_overhead(slots: int, isolation: str | None) -> float:
    """Return the seconds of an execution that does nothing, one at a time; the median."""
    async with _open(slots, isolation) as sandbox:
        return statistics.median([(await sandbox.run(f"print({ANSWER})", CASE)).wall for _ in range(30)])


@contextlib.asynccontextmanager
async def _open(slots: int, isolation: str | None) -> AsyncIterator[Sandbox]:
    sandbox = Sandbox(slots, isolation)
    try:
        yield sandbox
    finally:
        await sandbox.close()


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Raise WrongResult if the block leaves a process behind. Orphans within it become children of this process."""
    libc = ctypes.CDLL(None)
    before = _children()
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
        left = _reap(_children() - before)
        if left:
            raise WrongResult(f"{len(left)} processes are left: {sorted(left)}")
    finally:
        libc.prctl(_SUBREAPER, 0, 0, 0, 0)


def _reap(processes: set[int]) -> set[int]:
    """Take the status of those that have ended, as init would, and return the others; they have a moment to end."""
    until = time.monotonic() + _END_SECONDS
    while processes and time.monotonic() < until:
        for pid in sorted(processes):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    continue
            processes = processes - {pid}
        time.sleep(0.02)
    return processes


def _children() -> set[int]:
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        found.update(int(word) for word in path.read_text().split())
    return found


@contextlib.contextmanager
def load(processes: int) -> Iterator[None]:
    """Keep so many cores busy with processes that do nothing else."""
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0))
