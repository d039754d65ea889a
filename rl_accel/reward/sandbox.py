"""Runs untrusted programs and graders in worker processes, which can neither stall nor exhaust nor outlive the trainer process."""

import asyncio
import json
import logging
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from rl_accel.reward.execution import ExecutionResult, Limits
from rl_accel.reward.worker import Start, WorkerRequest, dumps
from rl_accel.reward.worker_pool import SandboxError, WorkerPool, bubblewrap_problem, choose_isolation, installed_path

__all__ = ["Case", "ExecutionResult", "Graders", "Limits", "Sandbox", "SandboxError", "bubblewrap_problem"]

Kind = Literal["stdin", "call"]


@dataclass(frozen=True)
class Case:
    """One test case of a program.

    Kind ``stdin``: the program reads ``given`` from its standard input. The text that the program prints must equal ``expected``,
    apart from trailing white space.
    Kind ``call``: a function of the program is called. ``given`` is the JSON text ``[name, arguments]``. The return value must
    equal the value in the JSON text ``expected``.

    Raises:
        ValueError: ``kind`` is unknown. Or the kind is ``call``, and ``given`` or ``expected`` is no such JSON text.
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


class Sandbox(WorkerPool):
    """Pool of worker processes for untrusted programs. Each program runs in a newly forked process. Use it from one event loop.

    Isolation "process": a program has its own session, resource limits, a minimal environment and a private folder. It also runs as
    another user if this process is root, and in its own PID and network namespaces if the kernel allows it.
    Isolation "bubblewrap": also a private /tmp and a read-only file system with only the interpreter and the system's programs.

    A warning lists what is not protected from programs: network, processes or files of this process's user. Without root, "process"
    does not protect files.

    Args:
        workers: maximum number of programs that run at once; further ones wait in order. None: number of cores of this process.
        isolation: "process", "bubblewrap", or "auto" (bubblewrap if it works on this machine, else process).

    Raises:
        SandboxError: ``isolation`` is "bubblewrap", and bubblewrap does not work on this machine.
        ValueError: ``workers`` is below 1, or ``isolation`` is unknown.
    """

    def __init__(self, workers: int | None = None, isolation: str = "auto") -> None:
        super().__init__(workers, Start(choose_isolation(isolation)))

    async def run(self, code: str, case: Case, limits: Limits | None = None) -> ExecutionResult:
        """Runs the program ``code`` on a test case. Cancelling this call stops the program at once.

        If the worker process dies, the program runs again on another worker. If that one dies too, the verdict is "killed".

        Raises:
            SandboxError: no worker can be started, or the sandbox is closed.
        """
        limits = limits or Limits()
        result, _ = await self._run(limits, WorkerRequest(limits.numbers(), code, asdict(case)))
        return result


class Graders(WorkerPool):
    """Pool of worker processes that call a grader (a function that computes the reward of a response). Use it from one event loop.

    Without isolation, the grader is trusted. A worker process imports it once and serves call after call. If a call exceeds the
    limit ``wall``, the only one that is enforced, its process and all that this has started are killed, and a new process takes its
    place. Concurrent calls run in several processes, which share no state. They have the environment, ``sys.path``, working folder,
    output and log format of this process. Arguments and return values are pickled.

    Isolation is for a grader that executes the code that it grades. Each call runs in its own forked process, and all limits are
    enforced. The grader is imported with a minimal environment, and sees only installed packages and ``readable``. Text that a call
    prints becomes ``output`` of the result. The return value crosses as JSON of at most 1 MB. Threads that the grader's module
    starts at import do not exist in the calls. Example, with verl's judge of programs::

        Graders("/path/of/prime_code/testing_util.py:run_test", isolation="auto")

    Args:
        target: import path of the grader, "module:function" or "/path/file.py:function". The file is added to ``readable``.
        workers: maximum number of calls that run at once; further ones wait in order. None: number of cores of this process.
        arguments: None if ``target`` is the grader. Else ``target`` is a function that returns the grader; each worker calls it
            once with these keyword arguments.
        isolation: None for a trusted grader; else "auto", "process" or "bubblewrap", as for a :class:`Sandbox`. "process" does not
            hide files that every user may read or, without root, files of this user.
        readable: files and folders that the grader reads at import or in a call.
        in_thread: True to call a trusted grader in a thread other than the main thread, as stock verl does.
        computing: maximum number of worker processes of a trusted grader while its calls mostly compute. While they mostly wait,
            for example for a server, up to ``workers`` processes are started. None: as many as ``workers``.
        environment: environment variables for a trusted grader, in addition to those of this process.
        setup: function, "module:function", that is called with ``environment`` before the import of a trusted grader.
        constants: keyword arguments that are the same objects in all calls, by name. Each process gets them once, at its start.
        folder: working folder during the import of a trusted grader; "" for the folder of this process, which calls always have.

    Raises:
        SandboxError, ValueError: as for a :class:`Sandbox`. Also ValueError if ``target`` has another form.
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
        constants: Mapping[str, Any] | None = None,
        folder: str = "",
    ) -> None:
        where, _, name = target.rpartition(":")
        if not where or not name:
            raise ValueError(f"target must be 'module:function' or '/path/file.py:function', found {target!r}")
        if "/" in where or where.endswith(".py"):
            # A trusted grader behind a link reads files next to the link; an isolated one sees the target of a link only.
            where = str(Path(where).resolve() if isolation else Path(where).absolute())
            readable = [*readable, where]
        isolation = choose_isolation(isolation) if isolation is not None else ""
        # Python ignores other entries of its path, such as a ``Path``.
        path = installed_path() if isolation else [entry for entry in sys.path if isinstance(entry, str)]
        known, logs = dict(environment or {}), {} if isolation else _logging_here()
        start = Start(isolation, folder, f"{where}:{name}", path, in_thread, False, known, setup, logs)
        self._trusted, self._target, self._constants = not isolation, target, dict(constants or {})
        payload = self._packed((None if arguments is None else dict(arguments), self._constants))
        super().__init__(workers, start, payload, [str(Path(item).resolve()) for item in readable], computing)

    async def call(
        self, kwargs: Mapping[str, Any], limits: Limits | None = None, args: Sequence[Any] = ()
    ) -> ExecutionResult:
        """Calls the grader. If a trusted grader changes an argument that is a dict or a list, the caller's object changes, too.

        Cancelling this call stops the grader, and all processes that it started, at once. If the worker process dies, the grader is
        called again on another worker. If that one dies too, the verdict is "killed".

        Raises:
            SandboxError: the grader cannot be imported, an argument cannot be pickled, no worker can be started, or this pool is
                closed.
        """
        constants = self._constants
        names = [name for name, value in kwargs.items() if name in constants and value is constants[name]]
        sent = {name: value for name, value in kwargs.items() if name not in names}
        payload = self._packed((tuple(args), sent, names))
        limits = limits or Limits()
        result, pickled = await self._run(limits, WorkerRequest(limits.numbers()), payload)
        if not pickled:
            return result
        failed = result.verdict == "error"
        try:
            if not self._trusted:  # a hostile program may have written it, so it is never unpickled
                return replace(result, value=await asyncio.to_thread(json.loads, pickled))
            content = pickle.loads(pickled)
            value, changes = (content, {}) if failed else content
        except Exception as error:
            reason = f"its value cannot be read: {type(error).__name__}: {error}"
            # that of a failed call is an exception whose class cannot be imported here
            return result if failed else replace(result, verdict="error", reason=reason)
        for name, changed in changes.items():
            argument = args[name] if isinstance(name, int) else kwargs[name]
            argument.clear()
            (argument.update if isinstance(argument, dict) else argument.extend)(changed)
        return replace(result, error=value) if failed else replace(result, value=value)

    def _packed(self, arguments: Any) -> bytes:
        try:
            return dumps(arguments)
        except Exception as error:
            raise SandboxError(
                f"{self._target} runs in another process, to which its arguments cannot be sent: {error}"
            ) from error


def _logging_here() -> dict[str, Any]:
    """Returns arguments of ``logging.basicConfig`` that give another process the level and format of this process's log."""
    handlers = logging.getLogger().handlers
    formatters = [handler.formatter for handler in handlers if type(handler.formatter) is logging.Formatter]
    known = [{"format": each._fmt, "datefmt": each.datefmt} for each in formatters if "%(" in (each._fmt or "")]
    return {"level": logging.getLogger().level, **(known[0] if known else {})} if handlers else {}
