"""Calls synchronous graders in processes that can be killed."""

import json
import pickle
import sys
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

from rl_accel.reward.pool import Pool
from rl_accel.reward.program import GradeResult, GradeVerdict, Limits
from rl_accel.reward.sandbox import ending
from rl_accel.reward.worker_process import Answer, SandboxError, Setup

__all__ = ["GradeResult", "Graders", "Limits", "SandboxError"]

_START_SECONDS = 300.0


class Graders:
    """A pool of warm workers that have imported a grader, each of which calls it in a process that it forks for the call.

    A worker has this process's environment, ``sys.path``, folder and output. The grader is trusted: of the limits only ``wall`` and
    ``cpu`` hold. Threads that its module starts when it is imported are not there in the calls. Use it from one event loop.

    Args:
        target: "module:function" or "/path/file.py:function".
        workers: calls at once; the others wait in order. None: the cores this process may use.
        arguments: if given, the target is called once in each worker with them (pickled), and returns the function.
        limited: hold the calls to all limits, as a :class:`Sandbox` with isolation "process" does: for one that executes what it
            grades. The import itself is free, and what it read is in reach. Where this process is root, calls run as another user,
            who can read ``sys.path``. Prints are dropped, and a call may return numbers, text, lists and dicts only.

    Raises:
        ValueError: the target has another form.
    """

    def __init__(
        self,
        target: str,
        workers: int | None = None,
        arguments: Mapping[str, Any] | None = None,
        limited: bool = False,
    ) -> None:
        where, _, name = target.rpartition(":")
        if not where or not name:
            raise ValueError(f"target must be 'module:function' or '/path/file.py:function', found {target!r}")
        if where.endswith(".py"):
            target = f"{Path(where).resolve()}:{name}"
        self.limited = limited
        message = {
            "serves": "grades",
            "limited": limited,
            "wrapped": False,
            "preload": [],
            "path": sys.path,
            "target": target,
        }
        if not limited:
            message["folder"] = ""
        payload = b"" if arguments is None else pickle.dumps(dict(arguments))
        self._pool = Pool(workers, Setup((), (), None, message, payload, _START_SECONDS))

    @property
    def deaths(self) -> int:
        """How many workers have died of themselves."""
        return self._pool.deaths

    async def call(self, kwargs: Mapping[str, Any], limits: Limits | None = None) -> GradeResult:
        """Call the grader with ``kwargs``. Cancelling this stops it, and all that it started, at once.

        A worker that dies is replaced and the call made again; if that one dies too, the verdict is "killed".

        Raises:
            SandboxError: the target cannot be imported, no worker can be started, or this is closed.
            Exception: ``kwargs`` cannot be pickled.
        """
        limits = limits or Limits()
        payload = pickle.dumps(dict(kwargs), pickle.HIGHEST_PROTOCOL)
        answer = await self._pool.run({"limits": limits.numbers()}, payload, limits.wall, limits.updates)
        if answer is None:
            return GradeResult(None, "killed", reason="two workers died over it")
        return _result(answer, self.limited)

    async def close(self) -> None:
        """End all workers. Calls that are running are stopped and get a SandboxError."""
        await self._pool.close()


class _Plain(pickle.Unpickler):
    """Reads numbers, text and their containers: what a limited grader sends may have been written by what it grades."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"a limited grader returns plain values, found {module}.{name}")


def _result(answer: Answer, limited: bool) -> GradeResult:
    found, told = answer
    measured = {name: found[name] for name in ("wall", "cpu", "waited")}
    if found["stopped"]:
        stop: GradeVerdict = "timeout" if found["stopped"] in ("wall", "cpu") else "killed"
        return GradeResult(None, stop, reason=f"{found['stopped']} limit", **measured)
    head, _, body = told.partition(b"\n")
    try:
        report = json.loads(head)
        verdict, reason = report["verdict"], str(report["reason"])
    except (ValueError, KeyError, TypeError):
        return GradeResult(None, "killed", reason=ending(found["status"]), **measured)
    if verdict != "done":
        return GradeResult(None, "error", reason=reason, **measured)
    try:
        value = _Plain(BytesIO(body)).load() if limited else pickle.loads(body)
    except Exception as error:
        return GradeResult(
            None, "error", reason=f"its value cannot be read: {type(error).__name__}: {error}", **measured
        )
    return GradeResult(value, "done", **measured)
