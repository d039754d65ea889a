"""Supervisor of untrusted programs, and the program's own process: ``python <this file> <socket descriptor>``.

The supervisor forks a process for each program, watches it, and kills it with all that it has started. It runs below the process
that grades or, if bubblewrap works, in bubblewrap. It imports the standard library only, so that a program finds the modules that
programs usually import, and no module of the trainer process.

What a program writes is JSON of at most :data:`REPORT_BYTES`. It is never unpickled.
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import io
import json
import math
import os
import pickle
import pwd
import re
import resource
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NoReturn

SIZE = struct.Struct("!Q")
"""Header of a message: the length in bytes of the message that follows: pickled to the supervisor, JSON from the supervisor."""
REPORT_BYTES = 1 << 20
"""Maximum size in bytes of the report of a program. A longer report stops the program."""
OUTPUT_KEPT = 10_000
"""Maximum number of characters of printed text in a result."""
WAITED_FACTOR = 10.0
"""Multiple of the wall limit after which a program is stopped, even if it has waited for a processor. The limit does not count such
waits."""
UID = 60_600
"""User id of untrusted code if this process is root. Neither Linux distributions nor systemd assign it."""
_PRELOADED = (
    "bisect collections copy datetime decimal fractions functools heapq importlib io itertools json math operator os random re"
    " shutil string sys tempfile time traceback typing"
)
"""Modules that programs usually import. The supervisor imports them once."""
_REPORT_DESCRIPTOR = 200
"""Lowest file descriptor for the pipe of a report. High, so that a program which closes low descriptors leaves it open."""
_LOOK_SECONDS = 0.02
"""Seconds between two checks of the limits. Chosen by hand."""
_FORK_BOMB_FACTOR = 64
"""Multiple of the limit of processes at which the kernel refuses further ones. It counts those of all programs of a user."""
_MOST_PROCESSES = 100_000
_COMMON_FOLDERS = [folder for folder in ("/tmp", "/var/tmp", "/dev/shm") if os.path.isdir(folder)]
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")

_LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWNS = 1 << 17
_NAMESPACES = _CLONE_NEWNS | 1 << 27 | 1 << 28 | 1 << 29 | 1 << 30  # mounts, IPC, user, PID, network
_MS_NOSUID_NODEV = (1 << 1) | (1 << 2)
_MS_BIND_REC = (1 << 12) | (1 << 14)
_MS_REC_PRIVATE = (1 << 14) | (1 << 18)
_CAPABILITIES_V3 = 0x20080522


# --- processes, as /proc shows them


def threads(pid: int) -> list[str]:
    """Returns the folders in /proc of all threads of a process; [] if it no longer exists."""
    try:
        return [f"/proc/{pid}/task/{name}" for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    """Returns the pids of all descendants of a process, also of those whose parents have ended if it is a subreaper."""
    below: list[int] = []
    parents = [pid]
    while parents and len(below) < _MOST_PROCESSES:
        for thread in threads(parents.pop()):
            with contextlib.suppress(OSError), open(f"{thread}/children") as file:
                children = list(map(int, file.read().split()))
                below += children
                parents += children
    return below


def seconds_waited(pid: int) -> float:
    """Returns the seconds that the threads of a process and its descendants have waited for a processor; 0 if unknown."""
    return sum(_waited(thread) for process in (pid, *descendants(pid)) for thread in threads(process))


def busy_seconds(pid: int) -> float:
    """Returns the seconds that a process and its descendants have computed or waited for a processor."""
    total = seconds_waited(pid)
    for process in (pid, *descendants(pid)):
        with contextlib.suppress(OSError, IndexError, ValueError):
            total += _Stat.of(process).cpu_seconds
    return total


def _waited(thread: str) -> float:
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"{thread}/schedstat") as file:
        return int(file.read().split()[1]) / 1e9
    return 0.0


@dataclass(frozen=True)
class _Stat:
    """Part of /proc/<pid>/stat.

    Attributes:
        cpu_seconds: CPU seconds of the process and of its ended children.
        resident_bytes: resident memory.
        stack: address of the stack, equal in a process and its forks until an exec.
    """

    cpu_seconds: float
    resident_bytes: int
    stack: int

    @classmethod
    def of(cls, pid: int) -> "_Stat":
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        ticks = sum(map(int, fields[11:15]))
        return cls(ticks / _TICKS, int(fields[21]) * _PAGE, int(fields[25]))


def _memfd_bytes(pids: Collection[int]) -> int:
    """Returns the bytes of all anonymous files (memfd) that the processes have open. They are no resident memory."""
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                path = f"/proc/{pid}/fd/{name}"
                with contextlib.suppress(OSError):
                    if os.readlink(path).startswith("/memfd:"):
                        found = os.stat(path)
                        sizes[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(sizes.values())


# --- messages


class PeerClosed(Exception):
    """The other end of the socket is closed."""


def frame(data: bytes) -> bytes:
    """Returns a message as it crosses a socket."""
    return SIZE.pack(len(data)) + data


class Channel:
    """Blocking end of a socket on which messages cross."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        control.setblocking(True)  # code of the user may have called socket.setdefaulttimeout

    def send(self, data: bytes) -> None:
        """Sends a message. Raises PeerClosed if the other end is closed."""
        try:
            self.control.sendall(frame(data))
        except OSError as error:
            raise PeerClosed from error

    def receive(self) -> bytes:
        """Returns the next message. Raises PeerClosed if the other end is closed."""
        return self._read(*SIZE.unpack(self._read(SIZE.size)))

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                received = self.control.recv(min(size - len(data), 1 << 20))
            except OSError as error:
                raise PeerClosed from error
            if not received:
                raise PeerClosed
            data += received
        return bytes(data)


# --- the supervisor


def main(descriptor: int) -> NoReturn:
    """Runs a supervisor until the other end of the socket with this file descriptor is closed."""
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    channel = Channel(control)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    box = None
    try:
        start = pickle.loads(channel.receive())
        try:
            judge = _import_judge(start["judge"])
            box = Box.make(start)
        except Exception as error:
            channel.send(json.dumps({"problem": f"{type(error).__name__}: {error}", "shared": []}).encode())
            os._exit(0)
        gc.collect()
        gc.freeze()  # garbage collection in a fork would copy every page
        channel.send(json.dumps({"problem": "", "shared": box.shared}).encode())
        while True:
            request = pickle.loads(channel.receive())
            if "limits" in request:  # else the message is for a program that has ended
                channel.send(json.dumps(_execute(channel, request, box, judge)).encode())
    except PeerClosed:
        pass
    finally:
        if box:
            box.sweep()
            remove(box.folder)
        os._exit(0)


def _import_judge(target: str) -> Callable[..., Any] | None:
    """Imports and returns the judge, "/path/file.py:function", or without one the modules that programs usually import."""
    for usual in _PRELOADED.split():
        importlib.import_module(usual)
    path, _, name = target.rpartition(":")
    if not path:
        return None
    spec = importlib.util.spec_from_file_location("judge", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function


class Sink:
    """Buffer for at most ``most`` bytes from a pipe. Also keeps the first byte beyond them, and then counts as full."""

    def __init__(self, descriptor: int, most: int) -> None:
        self.descriptor = descriptor
        self.data = bytearray()
        self._most = most
        os.set_blocking(descriptor, False)

    @property
    def full(self) -> bool:
        return len(self.data) > self._most

    def read(self) -> bool:
        """Reads the bytes that the pipe holds now. Returns False once the pipe has ended or this buffer is full, else True."""
        while not self.full:
            try:
                received = os.read(self.descriptor, min(self._most + 1 - len(self.data), 1 << 20))
            except BlockingIOError:
                return True
            if not received:
                return False
            self.data += received
        return False


def _execute(channel: Channel, request: dict[str, Any], box: "Box", judge: Callable[..., Any] | None) -> dict[str, Any]:
    """Runs a program and returns its result once all its processes have ended. Raises PeerClosed."""
    limits = request["limits"]
    report, to_report = os.pipe2(os.O_CLOEXEC)
    output, to_output = os.pipe2(os.O_CLOEXEC)
    sinks = (Sink(report, REPORT_BYTES), Sink(output, int(limits["output_bytes"])))
    folder = os.path.join(box.folder, "run")
    try:
        os.mkdir(folder, 0o700)
        if box.uid is not None:
            os.chown(folder, box.uid, box.uid)
        watch = Watch(limits, channel, box, sinks)
        child = os.fork()
        if child == 0:
            _run_child(request, box, judge, folder, to_output, to_report)
        os.close(to_report)
        os.close(to_output)
        stopped, status, seconds = watch.until_over(child)
    finally:
        remove(folder)
        os.close(report)
        os.close(output)
    printed = sinks[1].data.decode(errors="replace")
    result = _verdict(stopped, status, bytes(sinks[0].data), printed, request["case"])
    return {**result, **seconds, "output": printed[:OUTPUT_KEPT]}


def _verdict(stopped: str, status: int, report: bytes, printed: str, case: dict[str, Any]) -> dict[str, Any]:
    """Returns the verdict on a program, the reason for it, and the value that a judge returned.

    Args:
        stopped: name of the limit that stopped the program, or "".
        status: status of the process from ``os.waitpid``, if no limit stopped it.
        report: report of the process, or anything else that the program wrote there.
    """
    if stopped:
        verdicts = {"wall": "timeout", "cpu": "timeout", "memory": "memory"}
        return {"verdict": verdicts.get(stopped, "killed"), "reason": f"{stopped} limit"}
    ending = f"ended with status {os.WEXITSTATUS(status)} before its case was judged"
    if os.WIFSIGNALED(status):
        ending = f"ended by signal {os.WTERMSIG(status)}"
    try:
        head = json.loads(report)
        verdict = head["verdict"]
        reason = head["reason"]
        if verdict not in ("done", "error", "memory") or not isinstance(reason, str):
            return {"verdict": "error", "reason": "it wrote a report of its own"}
        if verdict != "done" or case["kind"] == "judge":
            return {"verdict": verdict, "reason": reason[:500], "value": json.dumps(head["value"])}
        if case["kind"] == "call":
            passed = head["value"] == json.loads(case["expected"])
            reason = f"found {head['value']!r}"[:200]
        else:
            passed = _lines(printed) == _lines(case["expected"])
            reason = "other output"
    except (ValueError, LookupError, TypeError, RecursionError):
        return {"verdict": "error", "reason": ending}
    return {"verdict": "passed", "reason": ""} if passed else {"verdict": "wrong", "reason": reason}


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


@dataclass
class Watch:
    """Watches one program, which starts when this object is created.

    Args:
        limits: limits by name, see :class:`rl_accel.reward.limited_executor.Limits`.
        channel: channel from which messages come that stop the program or set new limits.
        box: isolation of the program.
        sinks: buffers for the report and for the printed text.
    """

    limits: dict[str, float]
    channel: Channel
    box: "Box"
    sinks: tuple[Sink, Sink]
    _began: float = field(default_factory=time.monotonic, init=False)
    _waited: dict[str, float] = field(default_factory=dict, init=False)
    """Seconds that each thread of the program has waited for a processor, by the thread's folder in /proc."""

    def __post_init__(self) -> None:
        self._cpu_before = _cpu_of_ended()

    def until_over(self, child: int) -> tuple[str, int, dict[str, float]]:
        """Waits until the program ends or exceeds a limit, then kills all its processes.

        Returns, for the program whose first process has the pid ``child``: the name of the limit that stopped it ("cancelled" if a
        message did) or "", the status of ``child`` from ``os.waitpid``, and its seconds ``wall`` and ``cpu``.
        """
        stopped = self._until_end(child)
        wall = time.monotonic() - self._began
        used = self._use()
        if stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        self.box.sweep()
        for sink in self.sinks:
            sink.read()  # the bytes that are still in the pipe
        if not stopped and any(sink.full for sink in self.sinks):
            stopped = "output"
        if not stopped and os.WIFSIGNALED(status) and used["cpu"] > self.limits["cpu"]:
            stopped = "cpu"  # the kernel's limit acted first, because this process had no processor
        return stopped, status, {"wall": wall, "cpu": used["cpu"]}

    def _until_end(self, child: int) -> str:
        """Waits until the program ends or must be stopped. Returns the name of the limit, or ""."""
        sinks = {sink.descriptor: sink for sink in self.sinks}
        control = self.channel.control.fileno()
        ended = os.pidfd_open(child)
        poll = select.poll()
        for descriptor in (control, *sinks, ended):
            poll.register(descriptor, select.POLLIN)
        look_at = self._began + _LOOK_SECONDS
        try:
            while True:
                pause = max(0.0, look_at - time.monotonic())
                ready = {descriptor for descriptor, _ in poll.poll(pause * 1000)}
                if control in ready:
                    message = pickle.loads(self.channel.receive())
                    if "stop" in message:
                        return "cancelled"
                    self.limits |= message
                for descriptor in ready & sinks.keys():
                    if not sinks[descriptor].read():
                        poll.unregister(descriptor)
                if any(sink.full for sink in self.sinks):
                    return "output"
                if ended in ready:
                    return ""
                if time.monotonic() < look_at:
                    continue
                if exceeded := self._exceeded():
                    return exceeded
                look_at = time.monotonic() + _LOOK_SECONDS
        finally:
            os.close(ended)

    def _exceeded(self) -> str:
        """Returns the name of a limit that the program exceeds now, or ""."""
        used = self._use()
        wall = time.monotonic() - self._began
        # Threads may wait one after the other. If they wait at the same time, the sum is too large.
        waited = max(0.0, min(sum(self._waited.values()), wall - used["cpu"]))
        if wall - waited > self.limits["wall"] or wall > self.limits["wall"] * WAITED_FACTOR:
            return "wall"
        return next((name for name, amount in used.items() if amount > self.limits[name]), "")

    def _use(self) -> dict[str, float]:
        """Returns the CPU seconds, bytes of memory and number of threads of the program."""
        cpu = _cpu_of_ended() - self._cpu_before
        count = 0
        own = _Stat.of(os.getpid())
        pids = self.box.processes()
        memory = self.box.file_bytes() + _memfd_bytes(pids)
        for pid in pids:
            with contextlib.suppress(OSError, IndexError, ValueError):
                found = _Stat.of(pid)
                cpu += found.cpu_seconds
                is_fork = found.stack == own.stack and found.stack > 0  # False after an exec
                inherited = own.resident_bytes if is_fork else 0
                memory += max(0, found.resident_bytes - inherited)  # a page shared by two processes counts twice
            for thread in threads(pid):
                count += 1
                self._waited[thread] = max(_waited(thread), self._waited.get(thread, 0.0))
        return {"cpu": max(0.0, cpu), "memory": memory, "processes": count}


def _cpu_of_ended() -> float:
    """Returns the CPU seconds of all ended processes that this process has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# --- isolation


@dataclass
class Box:
    """Isolation of programs, one after the other.

    Attributes:
        folder: folder for the program's folder.
        shared: what programs share with the trainer process: "network", "processes", "files".
        uid: user of the programs; None: the user of this process.
        kept: paths of what does not belong to a program in the common folders.
    """

    folder: str
    shared: list[str]
    uid: int | None
    kept: frozenset[str]

    @classmethod
    def make(cls, start: dict[str, Any]) -> "Box":
        """Isolates the programs that this process will start. ``start``: first message to the supervisor."""
        uid = None
        shared = []
        if start["isolation"] != "bubblewrap":
            uid = UID if _may_become(UID) else None
            if _works(_enter_namespaces, start["memory"], uid):
                _enter_namespaces(start["memory"], uid)
            else:
                prctl(PR_SET_CHILD_SUBREAPER, 1)
                shared = ["network", "processes"]
                if uid is not None and (closed := _closed_folders()):
                    raise OSError(f"untrusted code runs as another user, who cannot read below {', '.join(closed)}")
            if uid is None:
                shared.append("files")
        if uid is None:
            prctl(_PR_SET_DUMPABLE, 0)  # a program of the same user cannot attach to this process
        folder = tempfile.mkdtemp(prefix="rl-accel-sandbox-", dir="/tmp")
        os.chmod(folder, 0o711)
        return cls(folder, shared, uid, frozenset(entry.path for each in _COMMON_FOLDERS for entry in os.scandir(each)))

    def processes(self) -> list[int]:
        """Returns the pids of all processes of the running program."""
        return descendants(os.getpid())

    def file_bytes(self) -> int:
        """Returns the bytes of files in memory: those in /tmp, /var/tmp and /dev/shm if they are the programs' own."""
        found = map(os.statvfs, _COMMON_FOLDERS if _is_apart() else ())
        return sum((each.f_blocks - each.f_bfree) * each.f_frsize for each in found)

    def sweep(self) -> None:
        """Kills and reaps all processes of the program, and removes its files in common folders."""
        if not _is_apart():
            _kill_all()
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # all processes of the namespace but this one, in one step
        _reap(until_none=True)
        for folder in _COMMON_FOLDERS:
            for entry in os.scandir(folder):
                if entry.path not in self.kept:
                    remove(entry.path)

    def drop_rights(self) -> None:
        """Gives this forked process the user of programs, and no rights."""
        if self.uid is not None:
            _become(self.uid)
        else:
            header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
            _check(_LIBC.capset(header, (ctypes.c_uint32 * 6)()), "capset")  # it has some if it is in a user namespace
        prctl(_PR_SET_DUMPABLE, 1)  # so that the supervisor sees its open files
        prctl(_PR_SET_NO_NEW_PRIVS, 1)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which resets this attribute


def _is_apart() -> bool:
    """True if programs have namespaces, and with them a /tmp of their own: this process is the first one of its namespace."""
    return os.getpid() == 1


def _works(function: Callable[..., Any], *args: Any) -> bool:
    """Returns whether a function works on this machine. Tries it in a fork."""
    trial = os.fork()
    if trial:
        return os.waitpid(trial, 0)[1] == 0
    with contextlib.suppress(BaseException):
        function(*args)
        os._exit(0)
    os._exit(1)


def _enter_namespaces(memory: int, uid: int | None) -> None:
    """Goes on in a fork, the first process of namespaces without network, and with a /tmp of at most ``memory`` bytes.

    This process itself only waits for the end of the fork. ``uid`` is another user for untrusted code.

    Raises:
        OSError: the kernel forbids it, or another user cannot read the interpreter.
    """
    wait, go_on = os.pipe()
    helper = os.fork()
    if helper == 0:  # only a process outside may map the ids of other users
        with contextlib.suppress(BaseException):
            os.close(go_on)
            os.read(wait, 1)
            _map_users(os.getppid(), 1 if uid is None else 1 << 16)
            os._exit(0)
        os._exit(1)
    os.close(wait)
    try:
        _check(_LIBC.unshare(_NAMESPACES), "unshare")
    finally:
        os.close(go_on)
    if os.waitpid(helper, 0)[1]:
        raise OSError("users cannot be mapped")
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")  # in a namespace of its own, a program could mount files that are not counted
    _mount("none", "/", None, _MS_REC_PRIVATE)
    for folder in _COMMON_FOLDERS:
        _cover(folder, f"mode=1777,size={int(memory)}")
    if uid is not None:
        for folder in _closed_folders():
            _cover(folder, "mode=0755,size=1m")
    first = os.fork()
    if first:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _mount("proc", "/proc", "proc", _MS_NOSUID_NODEV)


def _map_users(pid: int, count: int) -> None:
    """Maps ``count`` user and group ids to themselves, from those of this process on, in the user namespace of a process."""
    if count == 1:
        with open(f"/proc/{pid}/setgroups", "w") as file:
            file.write("deny")
    for name, first in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
        with open(f"/proc/{pid}/{name}", "w") as file:
            file.write(f"{first} {first} {count}")


def _closed_folders() -> list[str]:
    """Returns the folders, such as /root, that keep another user from the interpreter or from folders in ``sys.path``.

    Raises:
        OSError: such a folder itself cannot be read.
    """
    closed = set()
    for path in _interpreter_folders():
        if os.stat(path).st_mode & 0o005 != 0o005:
            raise OSError(
                f"untrusted code runs as another user, who cannot read {path}: `chmod -R o+rX {path}` lets it"
            )
        parents = [path[: match.start()] for match in re.finditer("/", path)][1:]
        closed.update([parent for parent in parents if not os.stat(parent).st_mode & 0o001][:1])
    return sorted(closed)


def _interpreter_folders() -> list[str]:
    roots = (sys.base_prefix, sys.prefix, *sys.path)
    return sorted({os.path.realpath(root) for root in roots if os.path.isdir(root)})


def _cover(folder: str, options: str) -> None:
    """Mounts an empty file system in memory over ``folder``, in which only the interpreter and ``sys.path`` are visible."""
    below = [path for path in _interpreter_folders() if path.startswith(f"{folder}/")]
    topmost = [path for path in below if not any(path.startswith(f"{other}/") for other in below)]
    sources = {path: os.open(path, os.O_PATH) for path in topmost}
    _mount("none", folder, "tmpfs", _MS_NOSUID_NODEV, options)
    for path, source in sources.items():
        os.makedirs(path, exist_ok=True)
        _mount(f"/proc/self/fd/{source}", path, None, _MS_BIND_REC)
        os.close(source)


def _may_become(uid: int) -> bool:
    """True if this process is root and can become the user ``uid``, which nobody else has."""
    if os.geteuid() != 0:
        return False
    with contextlib.suppress(KeyError):
        pwd.getpwuid(uid)
        return False
    return _works(_become, uid)  # in a container, root may lack capabilities or mapped user ids


def _become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _reap(until_none: bool = False) -> None:
    options = 0 if until_none else os.WNOHANG
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, options)[0]:
            pass


def _kill_all() -> None:
    """Kills and reaps all descendants of this process, without a PID namespace."""
    while True:
        _reap()
        living = descendants(os.getpid())
        if not living:
            return
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in living if number == signal.SIGSTOP else {*living, *descendants(os.getpid())}:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
        time.sleep(0.0005)


def remove(folder: str) -> None:
    """Removes a file or folder, even if it is missing, closed by its permissions, or nested too deeply for Python."""
    with contextlib.suppress(FileNotFoundError):
        try:
            if stat.S_ISDIR(os.lstat(folder).st_mode):
                shutil.rmtree(folder)
            else:
                os.unlink(folder)
        except FileNotFoundError:
            raise
        except (OSError, RecursionError):
            for command in (["chmod", "-R", "u+rwx", folder], ["rm", "-rf", folder]):
                with contextlib.suppress(OSError):
                    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def prctl(option: int, value: int) -> None:
    """Calls prctl of Linux."""
    _LIBC.prctl(option, value, 0, 0, 0)


def be_killed_first() -> None:
    """Has the kernel, out of memory, kill this process before the trainer process."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [text if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    _check(_LIBC.mount(*encoded[:3], flags, encoded[3]), f"mount {target}")


def _check(result: int, call: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


# --- the program's process


def _run_child(
    request: dict[str, Any],
    box: Box,
    judge: Callable[..., Any] | None,
    folder: str,
    output: int,
    report: int,
) -> NoReturn:
    """Body of the forked process: runs the program, writes the report, and exits without the program's cleanup handlers."""
    try:
        try:
            os.setsid()
            be_killed_first()
            report = _prepare(request, box, folder, output, report)
            signal.signal(signal.SIGINT, signal.default_int_handler)
        except BaseException as error:
            os.write(report, _report("error", f"the sandbox failed: {error!r}"))
            os._exit(70)
        first_process = os.getpid()
        text = run_program(request, judge)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        if os.getpid() == first_process:  # else this process is a fork that the program has made
            with contextlib.suppress(BaseException):
                while text:
                    text = text[os.write(report, text) :]
        os._exit(0)
    finally:
        os._exit(71)


def _prepare(request: dict[str, Any], box: Box, folder: str, output: int, report: int) -> int:
    """Sets working folder, input, output, environment, limits and user of a program.

    Returns the new file descriptor of the pipe ``report``. Closes all other pipes and files.
    """
    os.chdir(folder)
    with open("stdin", "wb") as file:
        given = request["case"]["given"] if request["case"]["kind"] == "stdin" else ""
        file.write(given.encode(errors="surrogateescape"))
    os.dup2(os.open("stdin", os.O_RDONLY), 0)
    os.unlink("stdin")
    os.dup2(output, 1)
    os.dup2(output, 2)
    report = fcntl.fcntl(report, fcntl.F_DUPFD_CLOEXEC, _REPORT_DESCRIPTOR)
    os.closerange(3, report)
    os.closerange(report + 1, 1 << 16)
    os.environ.clear()
    os.environ.update({"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"})
    tempfile.tempdir = None
    limits = request["limits"]
    with open("/proc/self/statm") as file:  # address space that this process has inherited from the supervisor
        inherited = int(file.read().split()[0]) * _PAGE
    for which, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, limits["memory"] + inherited),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CPU, math.ceil(limits["cpu"]) + 1),
        (resource.RLIMIT_NPROC, _FORK_BOMB_FACTOR * limits["processes"] if box.uid else resource.RLIM_INFINITY),
    ):
        most = resource.getrlimit(which)[1]
        bounded = most if value == resource.RLIM_INFINITY else int(value)
        if most != resource.RLIM_INFINITY:
            bounded = min(bounded, most)
        resource.setrlimit(which, (bounded, bounded))
    box.drop_rights()
    return report


def run_program(request: dict[str, Any], judge: Callable[..., Any] | None) -> bytes:
    """Runs a program on a test case, or calls the judge. Returns the report: JSON with the keys verdict, reason and value."""
    case = request["case"]
    try:
        if judge is not None:
            return _report("done", "", judge(**case["arguments"]), _plain)
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8", errors="surrogateescape")
        namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
        exec(compile(request["code"], "solution.py", "exec"), namespace)
        if case["kind"] == "stdin":
            return _report("done", "")
        name, arguments = json.loads(case["given"])
        if not callable(namespace.get(name)):
            return _report("error", f"there is no function {name}")
        return _report("done", "", namespace[name](*arguments))
    except SystemExit as error:
        is_end = case["kind"] == "stdin" and error.code in (None, 0)
        return _report("done", "") if is_end else _report("error", f"SystemExit: {error.code}")
    except MemoryError:
        return _report("memory", "MemoryError")
    except BaseException as error:
        return _report("error", describe(error))


def _report(verdict: str, reason: str, value: Any = None, default: Callable[[Any], Any] | None = None) -> bytes:
    """Returns a report. ``default`` converts parts of ``value`` that JSON does not have. Without it, they raise TypeError."""
    return json.dumps({"verdict": verdict, "reason": reason[:500], "value": value}, default=default).encode()


def _plain(value: Any) -> Any:
    """Converts a part of a judge's value, such as a number of numpy, for JSON."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def describe(error: BaseException) -> str:
    """Returns the type and text of ``error``, cut to 500 characters."""
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except BaseException:  # an exception whose text raises
        return type(error).__name__


if __name__ == "__main__":
    main(int(sys.argv[1]))
