"""A warm Python process that forks for each execution, watches the child, and leaves nothing of it behind. Run as a script.

Speaks JSON, one object a line, over the socket whose number is its first argument. It imports the standard library only, so that a
fork has what programs usually import and nothing of the trainer. One execution at a time: what descends from it belongs to that.
"""

# ruff: noqa: F401 - imported so that programs need not
import bisect
import collections
import contextlib
import copy
import ctypes
import datetime
import decimal
import fractions
import functools
import heapq
import importlib
import io
import itertools
import json
import math
import operator
import os
import random
import re
import resource
import select
import shutil
import signal
import socket
import string
import sys
import tempfile
import time
import traceback
import typing

OUTPUT_KEPT = 10_000
POLL_SECONDS = 0.02
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 1, 38, 36
CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
UID_BASE = 61_000
"""Programs run as UID_BASE + slot where this process is root: a user that owns nothing, whose processes are counted alone."""
_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Serve executions until the other side closes the socket. Arguments: its number, our slot, modules to import now."""
    control = socket.socket(fileno=int(sys.argv[1]))
    slot = int(sys.argv[2])
    for module in sys.argv[3:]:
        importlib.import_module(module)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ready = {
        "ready": os.getpid(),
        "network": "none" if _leave_network() else "shared",
        "problem": _let_interpreter_be_read(),
    }
    control.sendall(json.dumps(ready).encode() + b"\n")
    lines = _Lines(control)
    while (line := lines.next()) is not None:
        order = json.loads(line)
        if "run" in order:
            answer = json.dumps({"id": order["run"], **_run(order, lines, slot)})
            control.sendall(answer.encode() + b"\n")


def _leave_network() -> bool:
    """Move to a network of our own, which has no way out."""
    if os.geteuid() == 0:
        return bool(_LIBC.unshare(CLONE_NEWNET) == 0)
    return False  # a user namespace of our own would have to be mapped; bubblewrap does that


def _let_interpreter_be_read() -> str:
    """Where programs run as another user, see to it that this user can read the interpreter; say what stands in the way, or "".

    An interpreter below a closed folder (root's home, say) is shown in mounts of our own, where that folder holds nothing else.
    """
    if os.geteuid() != 0:
        return ""
    needed = sorted(
        {os.path.realpath(path) for path in (sys.base_prefix, sys.prefix, *sys.path) if os.path.isdir(path)}
    )
    closed: dict[str, list[str]] = {}
    for path in needed:
        folder = "/"
        for part in path.strip("/").split("/"):
            folder = os.path.join(folder, part)
            if not os.stat(folder).st_mode & 0o001:
                closed.setdefault(folder, []).append(path)
                break
    if not closed:
        return ""
    if _LIBC.unshare(CLONE_NEWNS) or _LIBC.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
        return f"programs would run as another user, who cannot read the interpreter below {', '.join(closed)}"
    for folder, paths in closed.items():
        below = [path for path in paths if not any(path != other and path.startswith(f"{other}/") for other in paths)]
        sources = {path: os.open(path, os.O_PATH) for path in below}
        _LIBC.mount(b"none", folder.encode(), b"tmpfs", 0, b"mode=0755")
        for path, source in sources.items():
            os.makedirs(path, exist_ok=True)
            if _LIBC.mount(f"/proc/self/fd/{source}".encode(), path.encode(), None, MS_BIND | MS_REC, None):
                return f"{path} could not be shown to the user that programs run as"
            os.close(source)
    return ""


class _Lines:
    """Lines from a socket, also without waiting."""

    def __init__(self, source: socket.socket) -> None:
        self.source = source
        self._rest = b""

    def next(self) -> bytes | None:
        """Wait for a line; None at the end."""
        while b"\n" not in self._rest:
            got = self.source.recv(1 << 16)
            if not got:
                return None
            self._rest += got
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def interrupted(self) -> bool:
        """Whether anything came, or the other side is gone: during an execution both mean that it is to stop."""
        if self._rest:
            return True
        with contextlib.suppress(BlockingIOError):
            got = self.source.recv(1 << 16, socket.MSG_DONTWAIT)
            if not got:
                os._exit(0)
            self._rest += got
            self._rest = self._rest.partition(b"\n")[2]
            return True
        return False


# The parent's side of an execution


def _run(order: dict[str, typing.Any], lines: _Lines, slot: int) -> dict[str, typing.Any]:
    limits = order["limits"]
    if order["case"]["kind"] == "pytest":
        with contextlib.suppress(ImportError):
            importlib.import_module("pytest")  # here, so that the next ones need not
    folder = tempfile.mkdtemp(prefix="rl-accel-run-")
    out_read, out_write = os.pipe2(os.O_CLOEXEC)
    report_read, report_write = os.pipe2(os.O_CLOEXEC)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    try:
        if os.geteuid() == 0:
            os.chown(folder, UID_BASE + slot, UID_BASE + slot)
        child = os.fork()
        if child == 0:
            _child(order, folder, slot, out_write, report_write, lines.source)  # does not return
        os.close(out_write)
        os.close(report_write)
        out_write = report_write = -1
        stopped, status, output = _watch(child, limits, began, out_read, lines, before)
        wall = time.monotonic() - began
        _kill_all(child)
        report = _read_all(report_read)
    finally:
        _kill_all(None)
        for descriptor in (out_read, out_write, report_read, report_write):
            if descriptor >= 0:
                os.close(descriptor)
        shutil.rmtree(folder, ignore_errors=True)
        _remove_strays(slot)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "stopped": stopped,
        "status": status,
        "report": report,
        "output": output[:OUTPUT_KEPT].decode(errors="replace"),
        "printed": output.decode(errors="replace") if order["case"]["kind"] == "stdin" else "",
        "wall": wall,
        "cpu": cpu,
    }


def _watch(
    child: int, limits: dict[str, typing.Any], began: float, out: int, lines: _Lines, before: object
) -> tuple[str, int, bytes]:
    """Wait for the child, or for a reason to stop it: (reason or "", its status or -1, what it printed)."""
    output = bytearray()
    os.set_blocking(out, False)
    poll = select.poll()
    ended = os.pidfd_open(child)
    for descriptor in (ended, lines.source.fileno(), out):
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
    ticks = os.sysconf("SC_CLK_TCK")
    page = os.sysconf("SC_PAGE_SIZE")
    try:
        while True:
            left = began + limits["wall"] - time.monotonic()
            if left <= 0:
                return "wall", -1, bytes(output)
            ready = {descriptor for descriptor, _ in poll.poll(min(left, POLL_SECONDS) * 1000)}
            if lines.source.fileno() in ready and lines.interrupted():
                return "cancelled", -1, bytes(output)
            if out in ready:
                got = _drain(out, limits["output_bytes"] + 1 - len(output))
                if got == b"":
                    poll.unregister(out)
                output += got or b""
                if len(output) > limits["output_bytes"]:
                    return "output", -1, bytes(output)
            if ended in ready:
                _, status = os.waitpid(child, 0)
                output += _drain(out, limits["output_bytes"] + 1 - len(output)) or b""
                return "", status, bytes(output)
            cpu, memory, _ = _usage(_descendants(os.getpid()), ticks, page)
            if cpu > limits["cpu"]:
                return "cpu", -1, bytes(output)
            if memory > limits["memory"]:
                return "memory", -1, bytes(output)
    finally:
        os.close(ended)


def _drain(descriptor: int, most: int) -> bytes | None:
    """Read what is there: b"" at the end, None if there is nothing now."""
    try:
        return os.read(descriptor, max(1, min(most, 1 << 16)))
    except BlockingIOError:
        return None


def _read_all(descriptor: int) -> str:
    os.set_blocking(descriptor, False)
    data = b""
    while got := _drain(descriptor, 1 << 16):
        data += got
        if len(data) > 1 << 16:
            break
    return data.decode(errors="replace")


def _descendants(pid: int) -> list[int]:
    """All processes below ``pid``. Orphans are our own children: this process is their subreaper."""
    found: list[int] = []
    todo = [pid]
    while todo:
        current = todo.pop()
        with contextlib.suppress(OSError), open(f"/proc/{current}/task/{current}/children") as file:
            children = [int(word) for word in file.read().split()]
            found += children
            todo += children
        if len(found) > 100_000:
            break
    return found


def _usage(processes: list[int], ticks: int, page: int) -> tuple[float, int, int]:
    """Processor seconds and resident bytes of living processes, and how many there are."""
    cpu = memory = 0
    for pid in processes:
        with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
            cpu += int(fields[11]) + int(fields[12])
            memory += int(fields[21])
    return cpu / ticks, memory * page, len(processes)


def _kill_all(first: int | None) -> None:
    """Kill every descendant and reap it. A process that is killed cannot fork any more, so a few rounds catch all."""
    if first is not None:
        with contextlib.suppress(OSError):
            os.killpg(first, signal.SIGKILL)
    while True:
        living = _descendants(os.getpid())
        for pid in living:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGSTOP)
        for pid in [*living, *_descendants(os.getpid())]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _remove_strays(slot: int) -> None:
    """Files that the program left where everybody may write; told by their owner, so only where this process is root."""
    if os.geteuid() != 0:
        return
    for folder in ("/tmp", "/var/tmp", "/dev/shm"):
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder):
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == UID_BASE + slot:
                        if entry.is_dir(follow_symlinks=False):
                            shutil.rmtree(entry.path, ignore_errors=True)
                        else:
                            os.unlink(entry.path)


# The child's side


def _child(order: dict[str, typing.Any], folder: str, slot: int, out: int, report: int, control: socket.socket) -> None:
    try:
        os.setsid()
        control.close()
        case, limits = order["case"], order["limits"]
        os.chdir(folder)
        given = case["given"] if case["kind"] == "stdin" else ""
        with open("stdin", "wb") as file:
            file.write(given.encode(errors="surrogateescape"))
        stdin = os.open("stdin", os.O_RDONLY)
        os.unlink("stdin")
        os.dup2(stdin, 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        report = _move_up(report)
        os.closerange(3, report)
        os.closerange(report + 1, 4096)
        os.environ.clear()
        os.environ.update({"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"})
        tempfile.tempdir = None
        _limit(limits, slot)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    except BaseException as error:
        os.write(report, json.dumps({"verdict": "error", "reason": f"the sandbox failed: {error!r}"}).encode())
        os._exit(70)
    _execute(order["code"], case, report)


def _move_up(descriptor: int) -> int:
    """Move the report out of the way of programs that close low descriptors."""
    import fcntl

    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 200)


def _limit(limits: dict[str, typing.Any], slot: int) -> None:
    def put(what: int, value: float) -> None:
        most = resource.getrlimit(what)[1]
        bounded = int(value) if most == resource.RLIM_INFINITY else min(int(value), most)
        resource.setrlimit(what, (bounded, bounded))

    put(resource.RLIMIT_CORE, 0)
    put(resource.RLIMIT_AS, limits["memory"])
    put(resource.RLIMIT_FSIZE, limits["file_bytes"])
    put(resource.RLIMIT_NOFILE, 256)
    put(resource.RLIMIT_CPU, math.ceil(limits["cpu"]) + 1)
    if os.geteuid() == 0:
        put(resource.RLIMIT_NPROC, limits["processes"])
        os.setgroups([])
        os.setresgid(UID_BASE + slot, UID_BASE + slot, UID_BASE + slot)
        os.setresuid(UID_BASE + slot, UID_BASE + slot, UID_BASE + slot)
    else:
        put(resource.RLIMIT_NPROC, limits["processes"] + _own_processes())
    _LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _own_processes() -> int:
    """Threads that this user has already: the limit counts them too."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == os.getuid():
                    count += len(os.listdir(f"/proc/{name}/task"))
    return count


def _execute(code: str, case: dict[str, typing.Any], report: int) -> None:
    """Run the program and its case, say how it went, and end without any cleaning up of the program's own."""
    program = os.getpid()
    verdict, reason = "passed", ""
    try:
        verdict, reason = _judge(code, case)
    except SystemExit as error:
        if case["kind"] != "stdin" or error.code not in (None, 0):
            verdict, reason = "error", f"SystemExit: {error.code}"
    except MemoryError:
        verdict, reason = "memory", "MemoryError"
    except BaseException as error:
        verdict, reason = "error", _describe(error)
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    if os.getpid() != program:  # a fork of the program's own has come back here
        os._exit(0)
    with contextlib.suppress(BaseException):
        os.write(report, json.dumps({"verdict": verdict, "reason": reason[:500]}).encode())
    os._exit(0)


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except BaseException:  # an exception whose text raises
        return type(error).__name__


def _judge(code: str, case: dict[str, typing.Any]) -> tuple[str, str]:
    kind = case["kind"]
    if kind == "pytest":
        return _pytest(code, case["given"])
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8", errors="surrogateescape")
    space: dict[str, typing.Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(code, "solution.py", "exec"), space)
    if kind == "stdin":
        return "passed", ""
    if kind == "assert":
        try:
            exec(compile(case["given"], "test.py", "exec"), space)
        except AssertionError as error:
            return "wrong", _describe(error)
        return "passed", ""
    name, arguments = json.loads(case["given"])
    if not callable(space.get(name)):
        return "error", f"there is no function {name}"
    found = json.loads(json.dumps(space[name](*arguments)))
    expected = json.loads(case["expected"])
    return ("passed", "") if found == expected else ("wrong", f"found {found!r}"[:200])


def _pytest(code: str, tests: str) -> tuple[str, str]:
    with open("solution.py", "w") as file:
        file.write(code)
    with open("test_solution.py", "w") as file:
        file.write(tests)
    import pytest

    sys.path.insert(0, os.getcwd())
    status = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "test_solution.py"])
    if status == 0:
        return "passed", ""
    return ("wrong", "tests failed") if status == 1 else ("error", f"pytest ended with {status!r}")


if __name__ == "__main__":
    main()
