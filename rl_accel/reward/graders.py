"""Calls synchronous graders in processes that can be killed."""

import json
import pickle
import sys
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

from rl_accel.reward.execution import ExecutionResult, Limits, Verdict
from rl_accel.reward.sandbox import ending, measurements
from rl_accel.reward.worker import Answer, Start
from rl_accel.reward.worker_pool import SandboxError, WorkerPool, WorkerSpec, choose_isolation, installed_path

__all__ = ["ExecutionResult", "Graders", "Limits", "SandboxError"]

_START_SECONDS = 300.0


class Graders:
    """A pool of warm workers that have imported a grader, each of which calls it in a process that it forks for the call.

    Without isolation the grader is trusted: a worker has this process's environment, ``sys.path``, folder and output, and of the
    limits only ``wall`` and ``cpu`` hold. With isolation all limits hold, and a worker is started as one of a
    :class:`~rl_accel.reward.sandbox.Sandbox` is: for a grader that executes what it grades. It is imported with an empty
    environment and sees installed packages and ``readable``, but nothing else on this process's ``sys.path``; it has no network;
    its prints are dropped; a call may return numbers, text, lists and dicts only. verl's judge of programs, say, is called so::

        Graders("/path/of/prime_case.py:load", arguments={"path": judge}, isolation="auto", readable=[judge])

    Threads that the grader's module starts when it is imported are not there in the calls. Use this from one event loop.

    Args:
        target: "module:function" or "/path/file.py:function"; such a file is readable.
        workers: calls at once; the others wait in order. None: the cores this process may use.
        arguments: if given, the target is called once in each worker with them (pickled), and returns the function.
        isolation: None, or as for a :class:`~rl_accel.reward.sandbox.Sandbox`: "auto", "process" or "bubblewrap". "process" hides
            no files that every user may read, and without root none of this user's.
        readable: files and folders that the grader reads, when it is imported or called.

    Raises:
        SandboxError: bubblewrap was asked for and does not work here.
        ValueError: the target has another form, or a value is out of range.
    """

    def __init__(
        self,
        target: str,
        workers: int | None = None,
        arguments: Mapping[str, Any] | None = None,
        isolation: str | None = None,
        readable: Sequence[str | Path] = (),
    ) -> None:
        where, _, name = target.rpartition(":")
        if not where or not name:
            raise ValueError(f"target must be 'module:function' or '/path/file.py:function', found {target!r}")
        if where.endswith(".py"):
            where = str(Path(where).resolve())
            readable = [*readable, where]
        self.isolation = choose_isolation(isolation) if isolation is not None else ""
        path = installed_path() if self.isolation else sys.path
        payload = b"" if arguments is None else pickle.dumps(dict(arguments))
        start = Start(self.isolation, target=f"{where}:{name}", path=path)
        shown = tuple(str(Path(item).resolve()) for item in readable)
        self._pool = WorkerPool(workers, WorkerSpec(start, payload, shown, _START_SECONDS))

    @property
    def deaths(self) -> int:
        """How many workers have died of themselves."""
        return self._pool.deaths

    async def call(self, kwargs: Mapping[str, Any], limits: Limits | None = None) -> ExecutionResult:
        """Call the grader with ``kwargs``. Cancelling this stops it, and all that it started, at once.

        A worker that dies is replaced and the call made again; if that one dies too, the verdict is "killed".

        Raises:
            SandboxError: the target cannot be imported, no worker can be started, or this is closed.
            Exception: ``kwargs`` cannot be pickled.
        """
        payload = pickle.dumps(dict(kwargs), pickle.HIGHEST_PROTOCOL)
        answer = await self._pool.run(limits or Limits(), {}, payload)
        if answer is None:
            return ExecutionResult("killed", reason="two workers died over it")
        return _result(*answer, trusted=not self.isolation)

    async def close(self) -> None:
        """End all workers. Calls that are running are stopped and get a SandboxError."""
        await self._pool.close()


class _Plain(pickle.Unpickler):
    """Reads numbers, text and their containers: what an isolated grader sends may have been written by what it grades."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"an isolated grader returns plain values, found {module}.{name}")


def _result(answer: Answer, report: bytes, trusted: bool) -> ExecutionResult:
    measured: dict[str, Any] = measurements(answer)
    if answer.stopped:
        verdict: Verdict = "timeout" if answer.stopped in ("wall", "cpu") else "killed"
        return ExecutionResult(verdict, reason=f"{answer.stopped} limit", **measured)
    head, _, body = report.partition(b"\n")
    try:
        message = json.loads(head)
        returned, reason = message["verdict"] == "done", str(message["reason"])
    except (ValueError, KeyError, TypeError):
        return ExecutionResult("killed", reason=ending(answer.status), **measured)
    if not returned:
        return ExecutionResult("error", reason=reason, **measured)
    try:
        value = pickle.loads(body) if trusted else _Plain(BytesIO(body)).load()
    except Exception as error:
        reason = f"its value cannot be read: {type(error).__name__}: {error}"
        return ExecutionResult("error", reason=reason, **measured)
    return ExecutionResult("done", value, **measured)
