"""Warm workers: the processes, our end of their sockets, and the pool that calls share."""

import asyncio
import contextlib
import fcntl
import functools
import itertools
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rl_accel.errors import RlAccelError
from rl_accel.reward import worker as worker_files
from rl_accel.reward.execution import Limits
from rl_accel.reward.worker import Answer, Message, Order, Ready, Start, encode
from rl_accel.reward.worker.isolation import remove

logger = logging.getLogger("rl_accel")

_LOST = (ConnectionError, asyncio.IncompleteReadError, asyncio.TimeoutError)
"""What a call of a worker raises that has died, or does not answer."""
_GRACE_SECONDS = 10.0
"""A worker that has not been heard so long after the wall limit is ended itself, with all that descends from it."""
_END_SECONDS = 8.0
"""A worker ends its program and itself in this time, or its reaper does it; then the reaper is killed."""
_LINE_BYTES = 64 << 20
_PREFIX = "rl-accel-sandbox-"
_SCRIPT = Path(worker_files.__file__)


class SandboxError(RlAccelError, RuntimeError):
    """Untrusted code cannot be run as was asked for, or no worker can be started."""


@dataclass(frozen=True)
class WorkerSpec:
    """How a worker is started.

    Attributes:
        start, payload: its first message. A folder is chosen for each worker.
        readable: files and folders that bubblewrap shows, read-only, beside the interpreter and the system's programs.
        seconds: it must be ready in this time.
    """

    start: Start
    payload: bytes = b""
    readable: tuple[str, ...] = ()
    seconds: float = 30.0


def choose_isolation(wanted: str) -> str:
    """Return "bubblewrap" or "process"; for "auto" the former where it works.

    Raises:
        ValueError: ``wanted`` is none of the three.
        SandboxError: bubblewrap is wanted and does not work here.
    """
    if wanted not in ("auto", "process", "bubblewrap"):
        raise ValueError(f"isolation must be auto, process or bubblewrap, found {wanted!r}")
    problem = bubblewrap_problem() if wanted != "process" else ""
    if wanted == "bubblewrap" and problem:
        raise SandboxError(f"bubblewrap does not work here: {problem}")
    return "process" if wanted == "process" or problem else "bubblewrap"


@functools.cache
def bubblewrap_problem() -> str:
    """Return why bubblewrap cannot be used here; "" if it can."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed"
    done = subprocess.run([*_bubblewrap(()), "true"], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr.strip()[:200]


def installed_path() -> list[str]:
    """Return the part of ``sys.path`` that belongs to the interpreter and to installed packages, and not to the user's own code."""
    standard = os.path.dirname(os.__file__)
    return [
        path for path in sys.path if path.startswith(standard) or path.endswith(("-packages", f"{os.sep}lib-dynload"))
    ]


def _bubblewrap(readable: Sequence[str]) -> list[str]:
    """The words before a command that is to see the interpreter, the system's programs and ``readable``, and nothing else.

    It has a private /tmp, no network, and is the first process of a PID namespace of its own.
    """
    shown = ["/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"]
    shown += [sys.base_prefix, sys.prefix, *installed_path(), *_library_folders(), str(_SCRIPT.parent), *readable]
    return [
        "bwrap",
        *("--dev", "/dev", "--proc", "/proc", "--tmpfs", "/dev/shm", "--tmpfs", "/tmp", "--tmpfs", "/var/tmp"),
        *(word for path in shown for word in ("--ro-bind-try", path, path)),  # last: an interpreter may lie below /tmp
        *("--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--as-pid-1"),
        *("--die-with-parent", "--new-session", "--"),
    ]


def _environment(isolation: str) -> dict[str, str] | None:
    if not isolation:
        return None
    libraries = {"LD_LIBRARY_PATH": ":".join(_library_folders())} if _library_folders() else {}
    return {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **libraries}


def _library_folders() -> list[str]:
    """Where the interpreter's libraries may lie beside the usual places."""
    return [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]


class Worker:
    """A worker that takes orders, one at a time.

    Attributes:
        process: its reaper, or bubblewrap.
        ready: its first message; None until that has come.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        self.ready: Ready | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._answer: asyncio.Future[tuple[Answer, bytes]] | None = None
        self._count = 0

    @classmethod
    async def spawn(cls, spec: WorkerSpec) -> "Worker":
        """Start one; :meth:`wait_ready` must follow.

        Raises:
            SandboxError: it cannot be started.
        """
        ours, theirs = socket.socketpair()
        isolation = spec.start.isolation
        shown = subprocess.DEVNULL if isolation else None
        with theirs:
            try:
                process = subprocess.Popen(
                    [
                        *(_bubblewrap(spec.readable) if isolation == "bubblewrap" else ()),
                        sys.executable,
                        *(("-I",) if isolation else ()),
                        str(_SCRIPT),
                        str(theirs.fileno()),
                    ],
                    pass_fds=[theirs.fileno()],
                    env=_environment(isolation),
                    cwd="/" if isolation else None,
                    stdin=subprocess.DEVNULL,
                    stdout=shown,
                    stderr=shown,
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise SandboxError(f"a worker cannot be started: {error}") from error
        worker = cls(process)
        worker._reader, worker._writer = await asyncio.open_connection(sock=ours, limit=_LINE_BYTES)
        worker._send(asdict(spec.start), spec.payload)
        return worker

    async def wait_ready(self, seconds: float) -> Ready:
        """Wait until it is ready for orders; if that fails, :meth:`kill` must follow.

        Raises:
            SandboxError: the message says why it is not, such as what its import raised.
        """
        try:
            message, _ = await asyncio.wait_for(self._read(), seconds)
        except _LOST as error:
            raise SandboxError(f"a worker was not ready within {seconds:g} s, or died") from error
        ready = Ready(**message)
        if ready.problem:
            raise SandboxError(ready.problem)
        self.ready = ready
        return ready

    @property
    def gone(self) -> bool:
        """Whether it, or its reaper, has died."""
        return self._reader.at_eof() or self.process.poll() is not None

    async def run(self, limits: Limits, order: Mapping[str, Any], payload: bytes) -> tuple[Answer, bytes]:
        """Send an order and wait for its answer; if this is cancelled, :meth:`stop` must follow, or :meth:`kill`.

        Raises:
            ConnectionError, asyncio.IncompleteReadError, asyncio.TimeoutError: the worker has died, or is stuck.
        """
        self._count += 1
        self._send(asdict(Order(self._count, limits.numbers(), **order)), payload)
        self._answer = asyncio.ensure_future(self._wait(limits.wall))
        self._answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())  # nobody else may ask
        with limits.updates.subscribed(self._change):
            return await asyncio.shield(self._answer)

    async def stop(self) -> None:
        """Have the worker stop what it runs, and wait until that is done.

        Raises: as :meth:`run`.
        """
        self._send({"stop": self._count})
        if self._answer is not None:
            await asyncio.wait_for(asyncio.shield(self._answer), _GRACE_SECONDS)

    async def kill(self) -> None:
        """Have the worker stop what it runs and end; if it does not, the processes themselves are killed."""
        self.hang_up()
        try:
            await asyncio.wait_for(asyncio.to_thread(self.process.wait), _END_SECONDS)
        except TimeoutError:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    def hang_up(self) -> None:
        """Close the socket, which ends the worker. Does not wait for it."""
        with contextlib.suppress(OSError):
            self._writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)  # a fork of ours may hold it open
        self._writer.close()

    def _change(self, wall: float, cpu: float) -> None:
        self._send({"change": self._count, "wall": wall, "cpu": cpu})

    def _send(self, message: Message, payload: bytes = b"") -> None:
        self._writer.write(encode(message, payload))

    async def _wait(self, wall: float) -> tuple[Answer, bytes]:
        seconds = wall + _GRACE_SECONDS
        while True:
            message, payload = await asyncio.wait_for(self._read(), seconds)
            if "alive" not in message:
                return Answer(**message), payload
            seconds = _GRACE_SECONDS

    async def _read(self) -> tuple[Message, bytes]:
        message: Message = json.loads(await self._reader.readuntil(b"\n"))
        return message, await self._reader.readexactly(message.pop("bytes"))


class WorkerPool:
    """At most ``size`` workers of one kind, each started when it is first needed. Use it from one event loop.

    Args:
        size: None: the cores this process may use.
        spec: how they are started.

    Attributes:
        deaths: how many workers have died of themselves.

    Raises:
        ValueError: fewer than one worker.
    """

    def __init__(self, size: int | None, spec: WorkerSpec) -> None:
        self.size = len(os.sched_getaffinity(0)) if size is None else size
        if self.size < 1:
            raise ValueError(f"workers must be at least 1, found {size!r}")
        self.deaths = 0
        self._spec = spec
        self._idle: deque[Worker] = deque()
        self._busy: set[Worker] = set()
        self._free = asyncio.Semaphore(self.size)
        self._folder: _BaseFolder | None = None
        self._numbers = itertools.count()
        self._closed = False
        self._warned = False

    @property
    def workers(self) -> list[Worker]:
        """All that live, those that have been idle for longest first."""
        return [*self._idle, *self._busy]

    async def run(self, limits: Limits, order: Mapping[str, Any], payload: bytes = b"") -> tuple[Answer, bytes] | None:
        """Run an order on the next free worker; None if two workers died over it. Cancelling this stops it at once.

        Args:
            limits: of the execution.
            order, payload: see :class:`~rl_accel.reward.worker.Order`.

        Returns:
            The answer, and the report of the execution.

        Raises:
            SandboxError: no worker can be started, or the pool is closed.
        """
        async with self._free:
            for attempt in (1, 2):
                worker = await self._take()
                try:
                    answer = await worker.run(limits, order, payload)
                except _LOST as error:
                    self.deaths += 1
                    await self._end(worker)
                    again = ", trying again" if attempt == 1 and not self._closed else ""
                    logger.warning("rl-accel: a sandbox worker died (%r)%s", error, again)
                except asyncio.CancelledError:
                    await asyncio.shield(asyncio.ensure_future(self._stop(worker)))
                    raise
                else:
                    self._busy.discard(worker)
                    self._idle.append(worker)
                    return answer
        return None

    async def close(self) -> None:
        """End all workers. What runs is stopped, and its callers get a SandboxError."""
        self._closed = True
        await asyncio.gather(*(self._end(worker) for worker in self._busy))
        for _ in range(self.size):  # until all callers have left
            await self._free.acquire()
        for _ in range(self.size):
            self._free.release()
        await asyncio.gather(*(self._end(worker) for worker in self._idle))
        self._idle.clear()
        if self._folder is not None:
            self._folder.remove()

    async def _stop(self, worker: Worker) -> None:
        """Have a worker whose caller has gone stop, and keep it if it does: to start it again may take long."""
        try:
            await worker.stop()
        except BaseException as error:
            await self._end(worker)
            if not isinstance(error, _LOST):
                raise
        else:
            self._busy.discard(worker)
            self._idle.append(worker)

    async def _take(self) -> Worker:
        """An idle worker, or a new one."""
        if self._closed:
            raise SandboxError("the sandbox is closed")
        while self._idle and self._idle[0].gone:  # it died while it had nothing to do: no order is to blame
            self.deaths += 1
            await self._end(self._idle.popleft())
        worker = self._idle.popleft() if self._idle else await Worker.spawn(self._spec_of_one())
        self._busy.add(worker)
        if worker.ready is None:
            try:
                shared = (await worker.wait_ready(self._spec.seconds)).shared
            except BaseException:
                await self._end(worker)
                raise
            if shared and self._spec.start.isolation and not self._warned:
                self._warned = True
                logger.warning("rl-accel: untrusted programs share this user's %s", " and ".join(shared))
        return worker

    def _spec_of_one(self) -> WorkerSpec:
        isolation, folder = self._spec.start.isolation, ""
        if isolation == "bubblewrap":
            folder = "/tmp/rl-accel"  # in a /tmp of its own
        elif isolation:
            if self._folder is None:
                self._folder = _BaseFolder()
            folder = os.path.join(self._folder.path, str(next(self._numbers)))
        return replace(self._spec, start=replace(self._spec.start, folder=folder))

    async def _end(self, worker: Worker) -> None:
        worker.hang_up()  # even if this is cancelled
        try:
            await worker.kill()
        finally:
            self._busy.discard(worker)


class _BaseFolder:
    """The folder of a pool: other users can enter it, and list nothing. It is locked for as long as its owner lives."""

    def __init__(self) -> None:
        parent = _temporary_folder()
        _remove_abandoned(parent)
        while True:
            self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if os.path.exists(self.path):  # else somebody who removes abandoned ones was faster than the lock
                break
            os.close(self._lock)
        os.chmod(self.path, 0o711)

    def remove(self) -> None:
        """Remove it with all in it."""
        if self._lock >= 0:
            remove(self.path)
            os.close(self._lock)
            self._lock = -1


def _temporary_folder() -> str:
    """Where temporary files go; where this process is root, programs run as another user, who must be able to get there."""
    folder = Path(tempfile.gettempdir()).resolve()
    if os.geteuid() == 0 and not all(part.stat().st_mode & 0o001 for part in (folder, *folder.parents)):
        return "/tmp"
    return str(folder)


def _remove_abandoned(parent: str) -> None:
    """Remove the folders of processes that died without doing so. The kernel frees a lock when its last holder has died."""
    for entry in os.scandir(parent):
        with contextlib.suppress(OSError):
            if not entry.name.startswith(_PREFIX) or entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            folder = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(entry.path)
            finally:
                os.close(folder)
