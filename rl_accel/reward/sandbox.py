"""Runs untrusted programs and graders in processes that cannot stall the trainer, exhaust its resources or outlive it."""

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

    ``stdin``: the program reads ``given`` as input; the printed text must equal ``expected``, apart from trailing white space.
    ``call``: ``given`` is JSON, ``[name, arguments]``; the function's return value as JSON must equal ``expected``, also JSON.

    Raises:
        ValueError: the kind is unknown, or a call has other content than this JSON.
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
    """Pool of warm workers for untrusted programs. A worker runs one program at a time, in a process forked for that program.

    Use this class from one event loop. With isolation "process", a program has its own session, limits, a minimal environment and
    a private folder. If this process is root, the program also has its own user; if the kernel allows it, also its own PID and
    network namespaces. "bubblewrap" adds a private /tmp and a read-only file system with only the interpreter and the system's
    programs. Resources that a program still shares with this user are logged once as a warning: without root, "process" does not
    protect this user's files.

    Args:
        workers: maximum number of programs at once; the others wait in order. None: number of cores this process may use.
        isolation: "process", "bubblewrap", or "auto": bubblewrap if it works, else process.

    Raises:
        SandboxError: bubblewrap was requested and does not work here.
        ValueError: a value is out of range.
    """

    def __init__(self, workers: int | None = None, isolation: str = "auto") -> None:
        self._pool = WorkerPool(workers, Start(choose_isolation(isolation)))

    async def run(self, code: str, case: Case, limits: Limits | None = None) -> ExecutionResult:
        """Runs ``code`` on ``case``. Cancelling this call stops the program at once.

        If the worker dies, the program runs again on another worker; if that worker dies too, the verdict is "killed".

        Raises:
            SandboxError: no worker can be started, or the sandbox is closed.
        """
        limits = limits or Limits()
        result, _ = await self._pool.run(limits, Order(limits.numbers(), code, asdict(case)))
        return result

    async def close(self) -> None:
        """Ends all workers. Running programs are stopped, and their callers get a SandboxError."""
        await self._pool.close()


class Graders:
    """Pool of workers that call a grader.

    Without isolation, the grader is trusted and long-lived: a process imports the grader once and serves call after call, so that
    caches, pools and connections last. A call that exceeds a limit ends the process and everything started by it; a new process
    takes its place. Concurrent calls run in several processes, which share no state; see
    :class:`~rl_accel.reward.worker_pool.WorkerPool`. Grader processes have this process's environment, ``sys.path``, working folder
    and output. Only the limits ``wall`` and ``cpu`` hold. Arguments and values are pickled, with cloudpickle if pickle fails.

    With isolation, for a grader that executes the code that it grades, each call runs in its own forked process, all limits hold,
    and workers start like those of a :class:`~rl_accel.reward.sandbox.Sandbox`. The grader is imported with a minimal environment.
    The grader sees installed packages and ``readable``, but no other part of this process's ``sys.path``. Text printed in a call is
    the result's ``output``; text printed at import is dropped. A call may return numbers, text, lists and dicts only. Threads that
    the module starts at import do not exist in the calls. Example, with verl's judge of programs::

        Graders("/path/of/prime_code/testing_util.py:run_test", isolation="auto")

    Use this class from one event loop.

    Args:
        target: "module:function" or "/path/file.py:function"; such a file is added to ``readable``.
        workers: maximum number of calls at once; the others wait in order. None: number of cores this process may use.
        arguments: if given, each worker calls the target once with these (pickled), and the returned function is the grader.
        isolation: None, or as for a :class:`~rl_accel.reward.sandbox.Sandbox`: "auto", "process" or "bubblewrap". "process" hides
            no files that every user may read and, without root, none of this user's files.
        readable: files and folders that the grader reads at import or in a call.
        in_thread: call a trusted grader outside the main thread, as a thread pool does.
        computing: maximum number of calls of a trusted grader that may compute at once, see
            :class:`~rl_accel.reward.worker_pool.WorkerPool`; None: as many as ``workers``.
        environment, setup: for a trusted grader, see :class:`~rl_accel.reward.worker.Start`.

    Raises:
        SandboxError: bubblewrap was requested and does not work here.
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
        """Starts the first worker and waits until this worker has imported the grader or failed. Needs no event loop."""
        self._pool.warm_up()

    @property
    def deaths(self) -> int:
        """Number of workers that died, or had to be ended because they did not answer."""
        return self._pool.deaths

    async def call(self, kwargs: Mapping[str, Any], limits: Limits | None = None) -> ExecutionResult:
        """Calls the grader with ``kwargs``. Cancelling this call stops the grader and all processes started by it at once.

        If the worker dies, the call is repeated on another worker; if that worker dies too, the verdict is "killed".

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
            if result.verdict == "error":  # the exception's class cannot be imported here
                return result
            reason = f"its value cannot be read: {type(error).__name__}: {error}"
            return replace(result, verdict="error", reason=reason)
        return replace(result, error=value) if result.verdict == "error" else replace(result, value=value)

    async def close(self) -> None:
        """Ends all workers. Running calls are stopped and raise a SandboxError."""
        await self._pool.close()


class _Plain(pickle.Unpickler):
    """Unpickles numbers, text and their containers only: untrusted code may have written the bytes from an isolated grader."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"an isolated grader returns plain values, found {module}.{name}")
