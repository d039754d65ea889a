"""The forked side of an execution: what it keeps of the worker and may use, and the program or grader that it runs."""

import contextlib
import fcntl
import importlib
import importlib.util
import io
import json
import math
import os
import pickle
import resource
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from . import Channel, Order
from .isolation import PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, Identity, drop_capabilities, prctl
from .watch import threads_of_user

Grader = Callable[..., Any]
_REPORT = 200
"""The report's number is above those that programs close one by one."""


@dataclass(frozen=True)
class Child:
    """What a fork of the worker executes, and where.

    Attributes:
        order, payload: the message that asks for it.
        grader: what is called; None runs the order's program.
        folder, out: where untrusted code runs, and where it prints to; None for a trusted grader.
        report: the pipe that its report goes to.
        identity: the user that untrusted code runs as; None: the worker's.
        channel: the worker's, which is closed here.
        unseen_threads: threads that this user has outside of this PID namespace.
    """

    order: Order
    payload: bytes
    grader: Grader | None
    folder: str | None
    out: int | None
    report: int
    identity: Identity | None
    channel: Channel
    unseen_threads: int

    def run(self) -> NoReturn:
        """Execute the order, report, and end without any cleaning up of the program's own."""
        try:
            self._run()
        finally:
            os._exit(71)

    def _run(self) -> None:
        report = self.report
        try:
            os.setsid()
            self.channel.control.close()
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")  # where memory ends, this goes before the trainer does
            if self.folder is not None and self.out is not None:
                report = self._confine(self.folder, self.out)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which would reset it
            signal.signal(signal.SIGINT, signal.default_int_handler)
        except BaseException as error:
            os.write(report, json.dumps({"verdict": "error", "reason": f"the sandbox failed: {error!r}"}).encode())
            os._exit(70)
        first_process = os.getpid()
        if self.grader is None:
            text = run_program(self.order.code, self.order.case)
        else:
            text = grade(self.grader, self.payload, plain=self.folder is not None)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        if os.getpid() == first_process:  # else a fork of the program's own has come back here
            with contextlib.suppress(BaseException):
                while text:
                    text = text[os.write(report, text) :]
        os._exit(0)

    def _confine(self, folder: str, out: int) -> int:
        """Leave untrusted code its folder, its input and its limits; return the report's new number."""
        os.chdir(folder)
        case = self.order.case
        with open("stdin", "wb") as file:
            file.write((case["given"] if case.get("kind") == "stdin" else "").encode(errors="surrogateescape"))
        stdin = os.open("stdin", os.O_RDONLY)
        os.unlink("stdin")
        os.dup2(stdin, 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        report = fcntl.fcntl(self.report, fcntl.F_DUPFD_CLOEXEC, _REPORT)
        os.closerange(3, report)
        os.closerange(report + 1, 1 << 16)
        os.environ.clear()
        os.environ.update({"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"})
        tempfile.tempdir = None
        limits = self.order.limits
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_AS, limits["memory"] + _address_space())
        _limit(resource.RLIMIT_FSIZE, limits["file_bytes"])
        _limit(resource.RLIMIT_NOFILE, 256)
        _limit(resource.RLIMIT_CPU, math.ceil(limits["cpu"]) + 1)
        if self.identity:
            _limit(resource.RLIMIT_NPROC, limits["processes"])
            self.identity.become()
        else:
            _limit(resource.RLIMIT_NPROC, limits["processes"] + threads_of_user() + self.unseen_threads)
            drop_capabilities()  # of a user namespace, if this is in one
            prctl(
                PR_SET_DUMPABLE, 1
            )  # the worker is not, so that nothing can attach to it; a program is as programs are
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        return report


def _limit(which: int, value: float) -> None:
    most = resource.getrlimit(which)[1]
    bounded = int(value) if most == resource.RLIM_INFINITY else min(int(value), most)
    resource.setrlimit(which, (bounded, bounded))


def _address_space() -> int:
    """Bytes that this process has from the worker; a grader's imports may take gigabytes of it."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def run_program(code: str, case: dict[str, str]) -> bytes:
    """Return the report of a program on a case, as JSON: its ``verdict`` and the ``reason``."""
    verdict, reason = "passed", ""
    try:
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8", errors="surrogateescape")
        namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
        exec(compile(code, "solution.py", "exec"), namespace)
        if case["kind"] == "call":
            verdict, reason = _call(namespace, case)
    except SystemExit as error:
        if case["kind"] != "stdin" or error.code not in (None, 0):
            verdict, reason = "error", f"SystemExit: {error.code}"
    except MemoryError:
        verdict, reason = "memory", "MemoryError"
    except BaseException as error:
        verdict, reason = "error", _describe(error)
    return json.dumps({"verdict": verdict, "reason": reason[:500]}).encode()


def _call(namespace: dict[str, Any], case: dict[str, str]) -> tuple[str, str]:
    name, arguments = json.loads(case["given"])
    if not callable(namespace.get(name)):
        return "error", f"there is no function {name}"
    value = json.loads(json.dumps(namespace[name](*arguments)))
    return ("passed", "") if value == json.loads(case["expected"]) else ("wrong", f"found {value!r}"[:200])


def find_grader(target: str, arguments: dict[str, Any] | None) -> Grader:
    """Return the function that ``target`` names, "module:function" or "/path/file.py:function".

    Args:
        target: with ``arguments`` it is called once with them, and what it returns is the function.

    Raises:
        BaseException: whatever its import or its call raises; TypeError if it is no function.
    """
    module, _, name = target.rpartition(":")
    function: Any = _load(module) if module.endswith(".py") else importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    if arguments is not None:
        function = function(**arguments)
    if not callable(function):
        raise TypeError(f"{target} must be a function, found {function!r}")
    grader: Grader = function
    return grader


def _load(path: str) -> Any:
    name = os.path.splitext(os.path.basename(path))[0]
    if name in sys.modules:
        name = f"{name}_of_rl_accel"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def grade(grader: Grader, payload: bytes, plain: bool) -> bytes:
    """Return the report of one call: a line of JSON with ``verdict`` and ``reason``, and the pickled value.

    Args:
        grader: the function.
        payload: its keyword arguments, pickled.
        plain: reduce the value to types that can be unpickled without trust in who wrote them.
    """
    try:
        value = grader(**pickle.loads(payload))
        body = pickle.dumps(_plain(value) if plain else value, pickle.HIGHEST_PROTOCOL)
        head = {"verdict": "done", "reason": ""}
    except BaseException as error:
        body = b""
        head = {"verdict": "error", "reason": _describe(error)}
    return json.dumps(head).encode() + b"\n" + body


def _plain(value: Any) -> Any:
    """The value of numbers, text, bytes, lists, tuples, sets and dicts; arrays become lists, their scalars numbers.

    Raises:
        TypeError: there is something else in it.
    """
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    if isinstance(value, dict):
        return {_plain(key): _plain(part) for key, part in value.items()}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return kind(_plain(part) for part in value)
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    for base in (int, float, str):
        if isinstance(value, base):  # an enum's member, say
            return base(value)
    raise TypeError(f"an isolated grader returns numbers, text, lists and dicts, found {type(value).__name__}")


def _describe(error: BaseException) -> str:
    """The error's type and text, at most 500 characters."""
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except BaseException:  # an exception whose text raises
        return type(error).__name__
