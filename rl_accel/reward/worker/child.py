"""The forked side of an execution: what it keeps of the worker, and what it may use."""

import contextlib
import fcntl
import json
import math
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from .channel import Channel, Header
from .grade import grade
from .identity import Identity
from .kernel import PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, drop_capabilities, prctl
from .run_program import run_program
from .tree import own_processes

_REPORT = 200
"""The report's number is above those that programs close one by one."""


@dataclass(frozen=True)
class Child:
    """What a fork needs to become an execution; see :class:`serve.Server` for where it comes from."""

    order: Header
    payload: bytes
    folder: str | None
    out: int | None
    report: int
    identity: Identity | None
    channel: Channel
    function: Callable[..., Any] | None
    outer: int

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
            self.channel.close()
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")  # where memory ends, this goes before the trainer does
            if self.folder is not None and self.out is not None:
                report = self._limit(self.folder, self.out)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which would reset it
            signal.signal(signal.SIGINT, signal.default_int_handler)
        except BaseException as error:
            os.write(report, json.dumps({"verdict": "error", "reason": f"the sandbox failed: {error!r}"}).encode())
            os._exit(70)
        program = os.getpid()
        if self.function is None:
            told = run_program(self.order["code"], self.order["case"])
        else:
            told = grade(self.function, self.payload, plain=self.folder is not None)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        if os.getpid() == program:  # else a fork of the program's own has come back here
            with contextlib.suppress(BaseException):
                while told:
                    told = told[os.write(report, told) :]
        os._exit(0)

    def _limit(self, folder: str, out: int) -> int:
        os.chdir(folder)
        case = self.order.get("case", {})
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
        self._set_limits(self.order["limits"])
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        return report

    def _set_limits(self, limits: Header) -> None:
        _put(resource.RLIMIT_CORE, 0)
        _put(resource.RLIMIT_AS, limits["memory"] + _address_space())
        _put(resource.RLIMIT_FSIZE, limits["file_bytes"])
        _put(resource.RLIMIT_NOFILE, 256)
        _put(resource.RLIMIT_CPU, math.ceil(limits["cpu"]) + 1)
        if self.identity:
            _put(resource.RLIMIT_NPROC, limits["processes"])
            self.identity.become()
        else:
            _put(resource.RLIMIT_NPROC, limits["processes"] + own_processes() + self.outer)
            drop_capabilities()  # of a user namespace, if this is in one


def _put(what: int, value: float) -> None:
    most = resource.getrlimit(what)[1]
    bounded = int(value) if most == resource.RLIM_INFINITY else min(int(value), most)
    resource.setrlimit(what, (bounded, bounded))


def _address_space() -> int:
    """Bytes that this process has from the worker; a grader's imports may take gigabytes of it."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
