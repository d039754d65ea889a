"""Warm workers: the processes, our end of their sockets, and the pool that calls share."""

import asyncio
import contextlib
import functools
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rl_accel.errors import RlAccelError
from rl_accel.reward import worker as worker_files
from rl_accel.reward.execution import ExecutionResult, Limits
from rl_accel.reward.worker import SIZES, Message, Order, Start, encode

logger = logging.getLogger("rl_accel")

_LOST = (ConnectionError, asyncio.IncompleteReadError, asyncio.TimeoutError)
"""What a call of a worker raises that has died, or does not answer."""
_GRACE_SECONDS = 10.0
"""A worker that has not been heard so long after the wall limit is ended itself, with all that descends from it."""
_END_SECONDS = 8.0
"""A worker ends its program and itself in this time, or its reaper does it; then the reaper is killed."""
_START_SECONDS = 300.0
"""A worker must be ready in this time, with all imports of its grader."""
_SCRIPT = Path(worker_files.__file__)


class SandboxError(RlAccelError, RuntimeError):
    """Untrusted code cannot be run as was asked for, or no worker can be started."""


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


def _library_folders() -> list[str]:
    """Where the interpreter's libraries may lie beside the usual places."""
    return [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]


def _temporary_folder(isolation: str) -> str:
    """Where temporary files go; where this process is root, programs run as another user, who must be able to get there."""
    folder = Path(tempfile.gettempdir()).resolve()
    is_closed = os.geteuid() == 0 and not all(part.stat().st_mode & 0o001 for part in (folder, *folder.parents))
    return "/tmp" if is_closed or isolation == "bubblewrap" else str(folder)


@dataclass(eq=False)
class Worker:
    """A worker that takes orders, one at a time. ``process`` is its reaper, or bubblewrap."""

    process: "subprocess.Popen[bytes]"
    channel: socket.socket
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    answer: "asyncio.Future[tuple[ExecutionResult, bytes]]" = field(init=False)

    @classmethod
    async def spawn(cls, start: Start, payload: bytes, readable: Sequence[str]) -> "Worker":
        """Start one; :meth:`wait_ready` must follow. Arguments as of :class:`WorkerPool`.

        Raises:
            SandboxError: it cannot be started.
        """
        ours, theirs = socket.socketpair()
        command, environment = [sys.executable, str(_SCRIPT), str(theirs.fileno())], None
        if start.isolation:
            command.insert(1, "-I")
            libraries = {"LD_LIBRARY_PATH": ":".join(_library_folders())} if _library_folders() else {}
            environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **libraries}
        if start.isolation == "bubblewrap":
            command = [*_bubblewrap(readable), *command]
        shown = subprocess.DEVNULL if start.isolation else None
        with theirs:
            try:
                process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    env=environment,
                    cwd="/" if start.isolation else None,
                    stdin=subprocess.DEVNULL,
                    stdout=shown,
                    stderr=shown,
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise SandboxError(f"a worker cannot be started: {error}") from error
        worker = cls(process, ours, *await asyncio.open_connection(sock=ours))
        worker._send(asdict(start), payload)
        return worker

    async def wait_ready(self) -> list[str]:
        """Wait until it is ready for orders, and return what untrusted code shares with this process.

        Raises:
            SandboxError: the message says why it is not, such as what its import raised. :meth:`kill` must follow.
        """
        try:
            message, _ = await asyncio.wait_for(self._read(), _START_SECONDS)
        except _LOST as error:
            raise SandboxError(f"a worker was not ready within {_START_SECONDS:g} s, or died") from error
        if message["problem"]:
            raise SandboxError(message["problem"])
        shared: list[str] = message["shared"]
        return shared

    @property
    def gone(self) -> bool:
        """Whether it, or its reaper, has died."""
        return self.reader.at_eof() or self.process.poll() is not None

    async def run(self, limits: Limits, order: Order, payload: bytes) -> tuple[ExecutionResult, bytes]:
        """Send an order and wait for its answer; if this is cancelled, :meth:`stop` must follow, or :meth:`kill`.

        Raises:
            ConnectionError, asyncio.IncompleteReadError, asyncio.TimeoutError: the worker has died, or is stuck.
        """
        self._send(asdict(order), payload)
        self.answer = asyncio.ensure_future(self._wait(limits.wall))
        self.answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())  # nobody else may ask
        with limits.updates.subscribed(lambda wall, cpu: self._send({"wall": wall, "cpu": cpu})):
            return await asyncio.shield(self.answer)

    async def stop(self) -> None:
        """Have the worker stop what it runs, and wait until that is done.

        Raises: as :meth:`run`.
        """
        self._send({"stop": True})
        await asyncio.wait_for(asyncio.shield(self.answer), _GRACE_SECONDS)

    async def kill(self) -> None:
        """Have the worker stop what it runs and end; if it does not, the processes themselves are killed."""
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)  # a fork of ours may hold it open
        self.writer.close()
        try:
            await asyncio.wait_for(asyncio.to_thread(self.process.wait), _END_SECONDS)
        except TimeoutError:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    def _send(self, message: Message, payload: bytes = b"") -> None:
        self.writer.write(encode(message, payload))

    async def _wait(self, wall: float) -> tuple[ExecutionResult, bytes]:
        seconds = wall + _GRACE_SECONDS
        while True:
            message, payload = await asyncio.wait_for(self._read(), seconds)
            if "alive" not in message:
                return ExecutionResult(**message), payload
            seconds = _GRACE_SECONDS

    async def _read(self) -> tuple[Message, bytes]:
        head_size, size = SIZES.unpack(await self.reader.readexactly(SIZES.size))
        return json.loads(await self.reader.readexactly(head_size)), await self.reader.readexactly(size)


class WorkerPool:
    """At most ``size`` workers of one kind, each started when it is first needed. Use it from one event loop.

    Args:
        size: None: the cores this process may use.
        start, payload: their first message.
        readable: files and folders that bubblewrap shows, read-only, beside the interpreter and the system's programs.

    Attributes:
        deaths: how many workers have died of themselves.

    Raises:
        ValueError: fewer than one worker.
    """

    def __init__(self, size: int | None, start: Start, payload: bytes = b"", readable: Sequence[str] = ()) -> None:
        self.size = len(os.sched_getaffinity(0)) if size is None else size
        if self.size < 1:
            raise ValueError(f"workers must be at least 1, found {size!r}")
        self.deaths = 0
        self._start = replace(start, folder=_temporary_folder(start.isolation))
        self._payload = payload
        self._readable = readable
        self._idle: deque[Worker] = deque()
        self._busy: set[Worker] = set()
        self._free = asyncio.Semaphore(self.size)
        self._closed = False
        self._warned = False

    async def run(self, limits: Limits, order: Order, payload: bytes = b"") -> tuple[ExecutionResult, bytes]:
        """Run an order on the next free worker; once more if that dies over it. Cancelling this stops it at once.

        Args:
            limits: of the execution.
            order, payload: the message to the worker.

        Returns:
            The result, and the pickled value of a grader.

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
                    stopping = asyncio.ensure_future(self._stop(worker))
                    while not stopping.done():  # a second cancellation must not give the slot away before it is free
                        with contextlib.suppress(asyncio.CancelledError):
                            await asyncio.shield(stopping)
                    raise
                else:
                    self._release(worker)
                    return answer
        return ExecutionResult("killed", reason="two workers died over it"), b""

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

    async def _stop(self, worker: Worker) -> None:
        """Have a worker whose caller has gone stop, and keep it if it does: to start it again may take long."""
        try:
            await worker.stop()
        except _LOST:
            await self._end(worker)
        else:
            self._release(worker)

    def _release(self, worker: Worker) -> None:
        self._busy.discard(worker)
        self._idle.append(worker)

    async def _take(self) -> Worker:
        """An idle worker, or a new one."""
        if self._closed:
            raise SandboxError("the sandbox is closed")
        while self._idle:
            worker = self._idle.popleft()
            self._busy.add(worker)
            if not worker.gone:
                return worker
            self.deaths += 1  # it died while it had nothing to do: no order is to blame
            await self._end(worker)
        worker = await Worker.spawn(self._start, self._payload, self._readable)
        self._busy.add(worker)
        try:
            shared = await worker.wait_ready()
        except BaseException:
            await self._end(worker)
            raise
        if shared and self._start.isolation and not self._warned:
            self._warned = True
            logger.warning("rl-accel: untrusted programs share this user's %s", " and ".join(shared))
        return worker

    async def _end(self, worker: Worker) -> None:
        try:
            await worker.kill()
        finally:
            self._busy.discard(worker)
