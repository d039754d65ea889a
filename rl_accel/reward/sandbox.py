"""Runs untrusted Python where it cannot stall, fill or outlive the trainer."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from rl_accel.reward.execution import ExecutionResult, Limits
from rl_accel.reward.worker import Answer, Start
from rl_accel.reward.worker_pool import SandboxError, WorkerPool, WorkerSpec, bubblewrap_problem, choose_isolation

__all__ = ["Case", "ExecutionResult", "Limits", "Sandbox", "SandboxError", "bubblewrap_problem"]

Kind = Literal["stdin", "call"]


@dataclass(frozen=True)
class Case:
    """One test case of a program.

    ``stdin``: the program is run with ``given`` as its input, and what it prints must be ``expected``, trailing white space aside.
    ``call``: ``given`` is JSON, ``[name, arguments]``; the function's value, as JSON, must equal ``expected``, JSON too.

    Raises:
        ValueError: the kind is unknown, or JSON was wanted.
    """

    kind: Kind
    given: str
    expected: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, found {self.kind!r}")
        if self.kind == "call":
            try:
                name, arguments = json.loads(self.given)
                json.loads(self.expected)
            except (ValueError, TypeError) as error:
                raise ValueError(f"a call wants JSON, [name, arguments] and the value expected: {error}") from error
            if not isinstance(name, str) or not isinstance(arguments, list):
                raise ValueError(f"a call wants [name, arguments], found {self.given!r}")


class Sandbox:
    """A pool of warm workers, each of which runs one program at a time in a process of its own that it forks for it.

    Use it from one event loop. With isolation "process" a program has a session, limits, an empty environment and a private folder;
    as root also a user of its own; where the kernel allows it also processes and a network of its own. "bubblewrap" adds a private
    /tmp and shows of the file system only the interpreter and the system's programs, read-only. What a program shares with this
    user all the same is logged once, as a warning: without root, "process" does not keep it from this user's files.

    Args:
        workers: programs run at once; the others wait in order. None: the cores this process may use.
        isolation: "process", "bubblewrap", or "auto": the latter where it works.
        preload: modules that workers import when they start, so that programs get them for nothing (``("numpy",)``).

    Raises:
        SandboxError: bubblewrap was asked for and does not work here.
        ValueError: a value is out of range.
    """

    def __init__(self, workers: int | None = None, isolation: str = "auto", preload: Sequence[str] = ()) -> None:
        self.isolation = choose_isolation(isolation)
        self._pool = WorkerPool(workers, WorkerSpec(Start(self.isolation, preload=list(preload))))

    async def run(self, code: str, case: Case, limits: Limits | None = None) -> ExecutionResult:
        """Run ``code`` on ``case``. Cancelling this call stops the program at once.

        A worker that dies is replaced and the program run again; if that one dies too, the program is held to have killed it.

        Raises:
            SandboxError: no worker can be started, or the sandbox is closed.
        """
        answer = await self._pool.run(limits or Limits(), {"code": code, "case": asdict(case)})
        return _result(*answer, case) if answer else ExecutionResult("killed", reason="two workers died over it")

    async def close(self) -> None:
        """End all workers. Programs that are running are stopped, and their callers get a SandboxError."""
        await self._pool.close()


def _result(answer: Answer, report: bytes, case: Case) -> ExecutionResult:
    measured: dict[str, Any] = {**measurements(answer), "output": answer.output}
    stopped = answer.stopped
    if stopped in ("wall", "cpu"):
        return ExecutionResult("timeout", reason=f"{stopped} limit", **measured)
    if stopped == "memory":
        return ExecutionResult("memory", reason="resident memory", **measured)
    if stopped:
        return ExecutionResult("killed", reason=stopped if stopped == "cancelled" else f"{stopped} limit", **measured)
    try:
        head = json.loads(report)
        verdict, reason = head["verdict"], str(head["reason"])
    except (ValueError, KeyError, TypeError):
        return ExecutionResult("error", reason=ending(answer.status), **measured)
    if verdict == "passed" and case.kind == "stdin" and _lines(answer.printed) != _lines(case.expected):
        return ExecutionResult("wrong", reason="other output", **measured)
    if verdict not in ("passed", "wrong", "error", "memory"):
        return ExecutionResult("error", reason="the program wrote a report of its own", **measured)
    return ExecutionResult(verdict, reason=reason, **measured)


def measurements(answer: Answer) -> dict[str, float]:
    """Return the seconds of an answer by the names they have in a result."""
    return {"wall": answer.wall, "cpu": answer.cpu, "waited": answer.waited}


def ending(status: int) -> str:
    """Return how a process ended that did not report."""
    if os.WIFSIGNALED(status):
        return f"ended by signal {os.WTERMSIG(status)}"
    return f"ended with status {os.WEXITSTATUS(status)} before its case was judged"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
