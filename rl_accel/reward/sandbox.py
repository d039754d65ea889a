"""Runs untrusted Python where it cannot stall, fill or outlive the trainer."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict

from rl_accel.reward.bubblewrap import bubblewrap, bubblewrap_problem
from rl_accel.reward.pool import Pool
from rl_accel.reward.program import Case, CaseResult, Limits
from rl_accel.reward.worker_process import Answer, SandboxError, Setup

__all__ = ["Case", "CaseResult", "Limits", "Sandbox", "SandboxError", "bubblewrap_problem"]

_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}


class Sandbox:
    """A pool of warm workers, each of which runs one program at a time in a process of its own that it forks for it.

    Use it from one event loop. ``isolation`` is "process" (process group, limits, empty environment, private folder; as root also a
    user of its own; where the kernel allows it also processes and a network of its own, else a warning is logged) or "bubblewrap"
    (all that, of the file system only the interpreter and the system's programs, read-only, and a private /tmp). Without root,
    "process" does not keep a program from this user's files.

    Args:
        workers: programs run at once; the others wait in order. None: the cores this process may use.
        isolation: None takes bubblewrap where it works.
        preload: modules that workers import when they start, so that programs get them for nothing (``("numpy",)``).

    Raises:
        SandboxError: bubblewrap was asked for and does not work here.
    """

    def __init__(self, workers: int | None = None, isolation: str | None = None, preload: Sequence[str] = ()) -> None:
        missing = bubblewrap_problem() if isolation in (None, "bubblewrap") else ""
        if isolation == "bubblewrap" and missing:
            raise SandboxError(f"bubblewrap does not work here: {missing}")
        self.isolation = "process" if isolation == "process" or missing else "bubblewrap"
        wrapped = self.isolation == "bubblewrap"
        message = {"serves": "programs", "limited": True, "wrapped": wrapped, "preload": list(preload)}
        if wrapped:
            message["folder"] = "/tmp/rl-accel"  # in a /tmp of its own
        before = tuple(bubblewrap()) if wrapped else ()
        self._pool = Pool(workers, Setup(before, ("-I",), _ENVIRONMENT, message))

    async def run(self, code: str, case: Case, limits: Limits | None = None) -> CaseResult:
        """Run ``code`` on ``case``. Cancelling this call stops the program at once.

        A worker that dies is replaced and the program run again; if that one dies too, the program is held to have killed it.

        Raises:
            SandboxError: no worker can be started, or the sandbox is closed.
        """
        limits = limits or Limits()
        order = {"code": code, "case": asdict(case), "limits": limits.numbers()}
        answer = await self._pool.run(order, b"", limits.wall, limits.updates)
        return _result(answer, case) if answer else CaseResult("killed", reason="two workers died over it")

    async def close(self) -> None:
        """End all workers. Programs that are running are stopped, and their callers get a SandboxError."""
        await self._pool.close()


def _result(answer: Answer, case: Case) -> CaseResult:
    found, told = answer
    measured = {name: found[name] for name in ("wall", "cpu", "waited", "output")}
    stopped = found["stopped"]
    if stopped in ("wall", "cpu"):
        return CaseResult("timeout", reason=f"{stopped} limit", **measured)
    if stopped == "memory":
        return CaseResult("memory", reason="resident memory", **measured)
    if stopped:
        return CaseResult("killed", reason=stopped if stopped == "cancelled" else f"{stopped} limit", **measured)
    try:
        report = json.loads(told)
        verdict, reason = report["verdict"], str(report["reason"])
    except (ValueError, KeyError, TypeError):
        return CaseResult("error", reason=ending(found["status"]), **measured)
    if verdict == "passed" and case.kind == "stdin" and _lines(found["printed"]) != _lines(case.expected):
        return CaseResult("wrong", reason="other output", **measured)
    if verdict not in ("passed", "wrong", "error", "memory"):
        return CaseResult("error", reason="the program wrote a report of its own", **measured)
    return CaseResult(verdict, reason=reason, **measured)


def ending(status: int) -> str:
    """How a process ended that did not report."""
    if os.WIFSIGNALED(status):
        return f"ended by signal {os.WTERMSIG(status)}"
    return f"ended with status {os.WEXITSTATUS(status)} before its case was judged"


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.rstrip().splitlines()]
    return lines
