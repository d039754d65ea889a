"""Runs untrusted programs, and graders, where they cannot stall, fill or outlive the trainer."""

import json
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from rl_accel.reward.execution import ExecutionResult, Limits
from rl_accel.reward.worker import Order, Start, dumps
from rl_accel.reward.worker_pool import SandboxError, WorkerPool, bubblewrap_problem, choose_isolation, installed_path

__all__ = ["Case", "ExecutionResult", "Graders", "Limits", "Sandbox", "SandboxError", "bubblewrap_problem"]

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

    Raises:
        SandboxError: bubblewrap was asked for and does not work here.
        ValueError: a value is out of range.
    """

    def __init__(self, workers: int | None = None, isolation: str = "auto") -> None:
        self._pool = WorkerPool(workers, Start(choose_isolation(isolation)))

    async def run(self, code: str, case: Case, limits: Limits | None = None) -> ExecutionResult:
        """Run ``code`` on ``case``. Cancelling this call stops the program at once.

        A worker that dies is replaced and the program run again; if that one dies too, the program is held to have killed it.

        Raises:
            SandboxError: no worker can be started, or the sandbox is closed.
        """
        limits = limits or Limits()
        result, _ = await self._pool.run(limits, Order(limits.numbers(), code, asdict(case)))
        return result

    async def close(self) -> None:
        """End all workers. Programs that are running are stopped, and their callers get a SandboxError."""
        await self._pool.close()


class Graders:
    """A pool of workers that call a grader.

    Without isolation the grader is trusted and lives on: a process imports it once and serves call after call, so that its caches,
    pools and connections last. A call that is stopped at its limit ends the process and all that it started, and another process
    takes its place. Calls at the same time run in several processes, which share no state; see
    :class:`~rl_accel.reward.worker_pool.WorkerPool`. A process has this one's environment, ``sys.path``, folder and output, and of
    the limits only ``wall`` and ``cpu`` hold. Arguments and values are pickled, with cloudpickle where pickle cannot.

    With isolation, for a grader that executes what it grades, each call runs in a process forked for it, all limits hold, and a
    worker is started as one of a :class:`~rl_accel.reward.sandbox.Sandbox` is. The grader is imported with an empty
    environment and sees installed packages and ``readable``, but nothing else on this process's ``sys.path``. What it prints
    in a call is the result's ``output``, what it prints when it is imported is dropped; a call may return numbers, text, lists and
    dicts only. Threads that its module starts when it is imported are not there in the calls. verl's judge of programs, say, is
    called so::

        Graders("/path/of/prime_code/testing_util.py:run_test", isolation="auto")

    Use this from one event loop.

    Args:
        target: "module:function" or "/path/file.py:function"; such a file is readable.
        workers: calls at once; the others wait in order. None: the cores this process may use.
        arguments: if given, the target is called once in each worker with them (pickled), and returns the function.
        isolation: None, or as for a :class:`~rl_accel.reward.sandbox.Sandbox`: "auto", "process" or "bubblewrap". "process" hides
            no files that every user may read, and without root none of this user's.
        readable: files and folders that the grader reads, when it is imported or called.
        in_thread: a trusted grader is called in a thread, as by an executor of threads, and not in the main one.
        computing: calls of a trusted grader that may compute at once, see
            :class:`~rl_accel.reward.worker_pool.WorkerPool`; None: as many as ``workers``.
        environment, setup: of a trusted grader, see :class:`~rl_accel.reward.worker.Start`.

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
        in_thread: bool = False,
        computing: int | None = None,
        environment: Mapping[str, str] | None = None,
        setup: str = "",
    ) -> None:
        where, _, name = target.rpartition(":")
        if not where or not name:
            raise ValueError(f"target must be 'module:function' or '/path/file.py:function', found {target!r}")
        if where.endswith(".py"):
            where = str(Path(where).resolve())
            readable = [*readable, where]
        isolation = choose_isolation(isolation) if isolation is not None else ""
        path = installed_path() if isolation else sys.path
        start = Start(isolation, "", f"{where}:{name}", path, in_thread, False, dict(environment or {}), setup)
        payload = b"" if arguments is None else dumps(dict(arguments))
        self._pool = WorkerPool(workers, start, payload, [str(Path(item).resolve()) for item in readable], computing)
        self._trusted = not isolation

    def warm_up(self) -> None:
        """Import the grader now, in its first worker, and wait until that is done. Needs no event loop."""
        self._pool.warm_up()

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
        payload = dumps(dict(kwargs))
        limits = limits or Limits()
        result, pickled = await self._pool.run(limits, Order(limits.numbers()), payload)
        if not pickled:
            return result
        try:
            value = pickle.loads(pickled) if self._trusted else _Plain(BytesIO(pickled)).load()
        except Exception as error:
            if result.verdict == "error":  # of a class that this process cannot import
                return result
            reason = f"its value cannot be read: {type(error).__name__}: {error}"
            return replace(result, verdict="error", reason=reason)
        return replace(result, error=value) if result.verdict == "error" else replace(result, value=value)

    async def close(self) -> None:
        """End all workers. Calls that are running are stopped and get a SandboxError."""
        await self._pool.close()


class _Plain(pickle.Unpickler):
    """Reads numbers, text and their containers: what an isolated grader sends may have been written by what it grades."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"an isolated grader returns plain values, found {module}.{name}")
