"""Pool of warm worker processes that execute programs or call graders. Each request takes a free worker from the pool.

This file also starts the worker processes, and sends the requests to them through sockets.
"""

import asyncio
import contextlib
import functools
import json
import logging
import math
import os
import select
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rl_accel.errors import RlAccelError
from rl_accel.reward import worker as worker_files
from rl_accel.reward.execution import ExecutionResult, Limits, LimitUpdates
from rl_accel.reward.worker import SIZES, Message, Start, WorkerRequest, encode

logger = logging.getLogger("rl_accel")

_LOST = (ConnectionError, asyncio.IncompleteReadError, asyncio.TimeoutError)
"""Exceptions that :meth:`Worker.run` raises if the worker has died or does not answer."""
_GRACE_SECONDS = 10.0
"""Seconds after the time limit of an execution by which the worker must have sent a message. Otherwise, the worker is killed."""
_END_SECONDS = 8.0
"""Seconds that :meth:`Worker.kill` waits until a worker has ended by itself."""
_START_SECONDS = 300.0
"""Maximum seconds from the start of a worker until it is ready, including all imports of its grader."""
_RETRY_PAUSE_SECONDS = 1.0
"""Seconds to wait before a request whose worker died is sent to another worker."""
_WAIT_SECONDS = 0.1
"""Seconds that a call of a grader without isolation waits for a busy worker before the pool starts another worker."""
_EARLY_FACTOR, _EARLY_PROCESSES = 2.0, 9
"""Constants of :meth:`WorkerPool._extra_seconds`: the result is ``_EARLY_FACTOR`` times the median over the last
``_EARLY_PROCESSES`` processes."""
_SCRIPT = Path(worker_files.__file__)


class SandboxError(RlAccelError, RuntimeError):
    """Raised if untrusted code cannot run with the requested isolation, or if no worker process can be started."""


def choose_isolation(wanted: str) -> str:
    """Returns the isolation to use, "bubblewrap" or "process".

    For "auto", returns "bubblewrap" if bubblewrap works on this machine, else "process". Otherwise returns ``wanted``.

    Raises:
        ValueError: ``wanted`` is not "auto", "process" or "bubblewrap".
        SandboxError: ``wanted`` is "bubblewrap", and bubblewrap does not work on this machine.
    """
    if wanted not in ("auto", "process", "bubblewrap"):
        raise ValueError(f"isolation must be auto, process or bubblewrap, found {wanted!r}")
    problem = bubblewrap_problem() if wanted != "process" else ""
    if wanted == "bubblewrap" and problem:
        raise SandboxError(f"bubblewrap does not work here: {problem}")
    return "process" if wanted == "process" or problem else "bubblewrap"


@functools.cache
def bubblewrap_problem() -> str:
    """Returns the reason why bubblewrap cannot be used on this machine, or "" if bubblewrap works."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed"
    done = subprocess.run([*_bubblewrap(()), "true"], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr.strip()[:200]


def installed_path() -> list[str]:
    """Returns the entries of ``sys.path`` that belong to the interpreter or to installed packages."""
    standard = os.path.dirname(os.__file__)
    ends = ("-packages", f"{os.sep}lib-dynload")
    return [path for path in map(str, sys.path) if path.startswith(standard) or path.endswith(ends)]


def _bubblewrap(readable: Sequence[str]) -> list[str]:
    """Returns the words to put before a command so that the command runs under bubblewrap.

    The command then sees only the interpreter, the system's programs and ``readable``. It has a private /tmp and no network.
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
    """Returns the folders in the environment variable ``LD_LIBRARY_PATH``."""
    return [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]


def _temporary_folder(isolation: str) -> str:
    """Returns the folder for temporary files of workers.

    This is /tmp for bubblewrap, and if this process is root and other users cannot enter Python's default folder. Otherwise it is
    Python's default folder.
    """
    folder = Path(tempfile.gettempdir()).resolve()
    is_closed = os.geteuid() == 0 and not all(part.stat().st_mode & 0o001 for part in (folder, *folder.parents))
    return "/tmp" if is_closed or isolation == "bubblewrap" else str(folder)


@dataclass(eq=False)
class Worker:
    """Client of one worker process, which executes requests one at a time.

    Attributes:
        process: process that supervises the worker (its reaper, or bubblewrap). None for a worker that was forked from a template.
        channel, reader, writer: this process's end of the socket to the worker, and the streams of this socket.
        forks: True for the template of a grader, which forks workers and takes no other requests.
        renews: True until the worker is ready, both after its start and while it replaces its process.
        waits: True if recent executions mostly waited for something other than a processor, by the worker's last message.
        history: record of the calls that the worker's current process has answered.
        answer: future with the return value of :meth:`run` for the latest execution; None before the first execution.
        due: time by which the worker must send its next message, in seconds of the event loop's clock.
    """

    process: "subprocess.Popen[bytes] | None"
    channel: socket.socket
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    forks: bool = False
    renews: bool = True
    waits: bool = False
    history: "History" = field(default_factory=lambda: History(), init=False)
    answer: "asyncio.Future[tuple[ExecutionResult, bytes]] | None" = field(default=None, init=False)
    due: float = field(default=0.0, init=False)

    @staticmethod
    def launch(
        start: Start, payload: bytes, readable: Sequence[str]
    ) -> "tuple[subprocess.Popen[bytes], socket.socket]":
        """Starts a worker process.

        The arguments are those of :class:`WorkerPool`.

        Returns:
            The process that supervises the worker, and our end of the socket to the worker.

        Raises:
            SandboxError: the new process cannot be started.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(True)  # code of the user may have called socket.setdefaulttimeout
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
        with contextlib.suppress(ConnectionError):  # the worker has died, which wait_ready says
            ours.sendall(encode(asdict(start), payload))
        return process, ours

    @classmethod
    async def of(cls, process: "subprocess.Popen[bytes] | None", channel: socket.socket) -> "Worker":
        """Returns a client of the worker at the other end of the socket ``channel``. Call :meth:`wait_ready` next."""
        return cls(process, channel, *await asyncio.open_connection(sock=channel))

    async def fork(self) -> "Worker":
        """Forks a new worker from this template and returns it. Call :meth:`wait_ready` of the new worker next.

        Raises:
            SandboxError: the template has died.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._send({"fork": True})  # sent at once: a template gets no other messages, so the buffer is empty
            try:
                socket.send_fds(self.channel, [b"f"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise SandboxError(f"a worker cannot be forked: {error}") from error
        return await Worker.of(None, ours)

    async def wait_ready(self) -> list[str]:
        """Waits until the worker is ready for requests.

        Returns:
            Names of the resources ("network", "processes", "files") that untrusted code in the worker shares with this process.

        Raises:
            SandboxError: the worker cannot start, for example because an import fails. Call :meth:`kill` next.
        """
        try:
            message, _ = await asyncio.wait_for(self._read(), _START_SECONDS)
        except _LOST as error:
            raise SandboxError(f"a worker was not ready within {_START_SECONDS:g} s, or died") from error
        if message["problem"]:
            raise SandboxError(message["problem"])
        self.forks, self.renews = "forks" in message, False
        shared: list[str] = message["shared"]
        return shared

    @property
    def gone(self) -> bool:
        """True if the worker has died, or its supervising process has ended."""
        return self.reader.at_eof() or (self.process is not None and self.process.poll() is not None)

    async def run(self, limits: Limits, request: WorkerRequest, payload: bytes) -> tuple[ExecutionResult, bytes]:
        """Sends a request to the worker and waits for the answer. If cancelled, call :meth:`stop` or :meth:`kill` next.

        Returns:
            The result of the execution, and the pickled value or exception of the grader (b"" if there is none).

        Raises:
            ConnectionError, asyncio.IncompleteReadError, asyncio.TimeoutError: the worker has died or does not answer.
        """
        self._send(asdict(request), payload)
        began = asyncio.get_running_loop().time()
        self.due = began + limits.wall + _GRACE_SECONDS
        self.answer = asyncio.ensure_future(self._wait())

        def change(wall: float, cpu: float) -> None:
            self._send({"wall": wall, "cpu": cpu})
            self._expect_message(by=began + wall)

        # Reads an exception of the future. A cancelled caller would not read it, and asyncio logs exceptions that nobody reads.
        self.answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())
        with limits.updates.subscribed(change):
            return await asyncio.shield(self.answer)

    async def stop(self) -> None:
        """Stops the current execution and waits for its end. Raises the same exceptions as :meth:`run`."""
        assert self.answer is not None  # future of the execution to stop
        self._send({"stop": True})
        await asyncio.wait_for(asyncio.shield(self.answer), _GRACE_SECONDS)

    async def kill(self) -> None:
        """Ends the worker and its execution. Kills :attr:`process` if it still runs after :data:`_END_SECONDS`."""
        with contextlib.suppress(OSError):
            # close() would not suffice, because a fork of this process may hold the socket too. A worker that was forked from a
            # template closes its end of the socket when all its processes have ended.
            self.channel.shutdown(socket.SHUT_RDWR if self.process else socket.SHUT_WR)
        if self.process:
            self.writer.close()
            try:
                await asyncio.wait_for(asyncio.to_thread(self.process.wait), _END_SECONDS)
            except TimeoutError:
                self.process.kill()
                await asyncio.to_thread(self.process.wait)
        else:
            if self.answer and not self.answer.done():  # two tasks must not read from a stream
                await asyncio.wait([self.answer], timeout=_END_SECONDS)
            if not self.answer or self.answer.done():
                with contextlib.suppress(*_LOST):
                    await asyncio.wait_for(self.reader.read(), _END_SECONDS)
            self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    def _send(self, message: Message, payload: bytes = b"") -> None:
        self.writer.write(encode(message, payload))

    def _expect_message(self, by: float) -> None:
        """Sets :attr:`due` to :data:`_GRACE_SECONDS` after ``by``, or after the current time if ``by`` has passed."""
        self.due = max(by, asyncio.get_running_loop().time()) + _GRACE_SECONDS

    async def _wait(self) -> tuple[ExecutionResult, bytes]:
        while True:
            message, payload = await self._next_message()
            self.waits = message.pop("waits", self.waits)
            if "alive" not in message:
                self.renews = message.pop("renews", False)
                if self.renews:
                    self.history = History()
                return ExecutionResult(**message), payload
            self._expect_message(by=self.due - _GRACE_SECONDS)

    async def _next_message(self) -> tuple[Message, bytes]:
        """Returns the next message of the worker. Raises TimeoutError if none has come by :attr:`due`."""
        reading, now = asyncio.ensure_future(self._read()), asyncio.get_running_loop().time
        try:
            while not reading.done():
                if now() >= self.due:
                    raise TimeoutError
                await asyncio.wait([reading], timeout=min(self.due - now(), _GRACE_SECONDS))
        finally:
            reading.cancel()
        return reading.result()

    async def _read(self) -> tuple[Message, bytes]:
        head_size, size = SIZES.unpack(await self.reader.readexactly(SIZES.size))
        return json.loads(await self.reader.readexactly(head_size)), await self.reader.readexactly(size)


@dataclass
class History:
    """Record of the calls that one process of a grader has answered. The kind of a call is ``Limits.kind``.

    Attributes:
        proven: kinds of calls to which the process has given a correct answer.
        longest: seconds of the longest call of each kind.
    """

    proven: set[str] = field(default_factory=set)
    longest: dict[str, float] = field(default_factory=dict)


class EarlyCall:
    """Raised time limits of a call in a new process of a grader, which may first have to load something, such as a model.

    A process is new until it has given a correct answer to a call of the same kind (``Limits.kind``).

    Args:
        limits: normal limits of the call. Only ``wall``, ``cpu`` and ``full`` are used.
        extra: seconds by which ``wall`` and ``cpu`` are raised, up to ``full``.
    """

    def __init__(self, limits: Limits, extra: float) -> None:
        self._seconds, self._full, self._extra = (limits.wall, limits.cpu), limits.full or 0.0, extra
        self.updates = LimitUpdates()

    def raised(self) -> tuple[float, float]:
        """Returns the raised limits: wall seconds and CPU seconds."""
        wall, cpu = (max(seconds, min(seconds + self._extra, self._full)) for seconds in self._seconds)
        return wall, cpu

    def set_limits(self, wall: float, cpu: float) -> None:
        self._seconds = wall, cpu
        self.updates.publish(*self.raised())

    def set_extra(self, extra: float) -> None:
        self._extra = extra
        self.updates.publish(*self.raised())


class WorkerPool:
    """Pool of at most ``size`` worker processes for one grader, or for programs under test. Use it from one event loop only.

    Workers are started when calls wait for them. A grader without isolation gets another worker only if a call has waited for 0.1
    seconds, because each worker has caches of its own.

    Args:
        size: maximum number of workers; None: number of cores that this process may use.
        computing: maximum number of workers for a grader without isolation that computes. More workers, up to ``size``, are started
            only while all workers mostly wait for something other than a processor. None: ``size``.
        start, payload: first message to each worker, and the payload of this message; see :class:`~rl_accel.reward.worker.Start`.
        readable: files and folders that bubblewrap shows read-only, in addition to the interpreter and the system's programs.

    Attributes:
        deaths: number of workers that died, or that were killed because they did not answer.

    Raises:
        ValueError: ``size`` is below 1.
    """

    def __init__(
        self,
        size: int | None,
        start: Start,
        payload: bytes = b"",
        readable: Sequence[str] = (),
        computing: int | None = None,
    ) -> None:
        self.size = len(os.sched_getaffinity(0)) if size is None else size
        if self.size < 1:
            raise ValueError(f"workers must be at least 1, found {size!r}")
        self.deaths = 0
        self._computing = self.size if computing is None or start.isolation else computing
        self._start = replace(start, folder=_temporary_folder(start.isolation)) if start.isolation else start
        self._payload = payload
        self._readable = readable
        self._launched: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._template: Worker | None = None
        self._workers: set[Worker] = set()
        self._unready: set[Worker] = set()
        self._idle: list[Worker] = []
        self._waiting: deque[asyncio.Future[Worker]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting = 0
        self._early_calls: list[tuple[str, EarlyCall]] = []
        self._early_seconds: dict[str, deque[float]] = {}
        self._growth: asyncio.TimerHandle | None = None
        self._closed = False
        self._warned = False

    def warm_up(self) -> None:
        """Starts the first worker and waits until it is ready or has failed. Needs no event loop."""
        self._launched = Worker.launch(self._start, self._payload, self._readable)
        poll = select.poll()
        poll.register(self._launched[1], select.POLLIN)
        poll.poll(_START_SECONDS * 1000)

    async def _run(self, limits: Limits, request: WorkerRequest, payload: bytes = b"") -> tuple[ExecutionResult, bytes]:
        """Runs a request on the next free worker. Returns the same as :meth:`Worker.run`.

        If the worker dies, runs the request on another worker. If this worker dies, too, the verdict is "killed".

        Raises:
            SandboxError: no worker can be started, or the pool is closed.
        """
        for attempt in (1, 2):
            worker = await self._take()
            try:
                if limits.kind in worker.history.proven or self._start.isolation:
                    answer = await worker.run(limits, request, payload)
                else:
                    answer = await self._run_early(worker, limits, request, payload)
            except _LOST as error:
                self.deaths += 1
                await self._end(worker)
                again = ", trying again" if attempt == 1 and not self._closed else ""
                logger.warning("rl-accel: a sandbox worker died (%r)%s", error, again)
                if again:
                    await asyncio.sleep(_RETRY_PAUSE_SECONDS)
            except asyncio.CancelledError:
                stopping = self._do(self._stop(worker))
                while not stopping.done():  # a second cancellation must not end this call before the execution
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.shield(stopping)
                raise
            else:
                self._free(worker)
                return answer
        return ExecutionResult("killed", reason="two workers died while running it"), b""

    async def _run_early(
        self, worker: Worker, limits: Limits, request: WorkerRequest, payload: bytes
    ) -> tuple[ExecutionResult, bytes]:
        """Runs a request with the higher time limits of an :class:`EarlyCall`. Returns the same as :meth:`Worker.run`."""
        kind, history = limits.kind, worker.history
        call = EarlyCall(limits, self._extra_seconds(kind))
        wall, cpu = call.raised()
        raised = replace(limits, wall=wall, cpu=cpu, updates=call.updates)
        self._early_calls.append((kind, call))
        try:
            with limits.updates.subscribed(call.set_limits):
                result, body = await worker.run(raised, replace(request, limits=raised.numbers()), payload)
        finally:
            self._early_calls.remove((kind, call))
        history.longest[kind] = max(result.wall - result.waited, history.longest.get(kind, 0.0))
        return replace(result, prove=functools.partial(self._prove, kind, history)), body

    def _prove(self, kind: str, history: History) -> None:
        """Records that a process has given its first correct answer to a call of ``kind``.

        Also updates the time limits of all running :class:`EarlyCall` of this kind.
        """
        history.proven.add(kind)
        self._early_seconds.setdefault(kind, deque(maxlen=_EARLY_PROCESSES)).append(history.longest[kind])
        for other, call in self._early_calls:
            if other == kind:
                call.set_extra(self._extra_seconds(kind))

    def _extra_seconds(self, kind: str) -> float:
        """Returns the extra seconds for a call in a new process, see :class:`EarlyCall`; infinity before the first correct answer.

        The result is twice the median, over earlier processes, of the longest call up to the first correct answer.
        """
        # Loading happens in one of these calls. The median ignores a few calls that were slow for another reason.
        seconds = self._early_seconds.get(kind)
        return _EARLY_FACTOR * statistics.median(seconds) if seconds else math.inf

    async def close(self) -> None:
        """Ends all workers. Stops running executions, whose callers get a SandboxError."""
        self._closed = True
        while self._workers or self._unready or self._tasks:
            ends = map(self._end, self._workers | self._unready)
            await asyncio.gather(*ends, *self._tasks, return_exceptions=True)
        if self._launched:
            self._template, self._launched = await Worker.of(*self._launched), None
        if self._template:
            await self._template.kill()
        self._template = None
        self._idle.clear()
        while waiter := self._next_waiting():
            waiter.set_exception(SandboxError("the sandbox is closed"))

    def abandon(self) -> None:
        """Shuts down the sockets of all workers, so that they end by themselves. For a pool whose event loop is closed already."""
        channels = [worker.channel for worker in (*self._workers, *self._unready, self._template) if worker]
        for channel in [*channels, self._launched[1]] if self._launched else channels:
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)

    async def _stop(self, worker: Worker) -> None:
        """Stops the execution of a worker and frees the worker. Kills the worker if the execution does not stop in time."""
        try:
            await worker.stop()
        except _LOST:
            await self._end(worker)
        else:
            self._free(worker)

    async def _take(self) -> Worker:
        """Returns a free worker. Waits for one if all are busy."""
        if self._closed:
            raise SandboxError("the sandbox is closed")
        while self._idle:
            worker = self._idle.pop()
            if not worker.gone:
                return worker
            self.deaths += 1  # the worker died while idle: no request is to blame
            await self._end(worker)
        waiter: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._grow_soon()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and not waiter.exception():
                self._free(waiter.result())
            raise

    def _free(self, worker: Worker) -> None:
        """Gives a worker to the call that has waited longest. If no call waits, the worker becomes idle.

        If the worker is replacing its process, does so when the new process is ready.
        """
        if worker.renews:
            self._do(self._welcome(worker))
            return
        if waiter := self._next_waiting():
            waiter.set_result(worker)
        else:
            self._idle.append(worker)

    def _next_waiting(self) -> "asyncio.Future[Worker] | None":
        """Removes the call that has waited longest for a worker, and returns its future; None if no call waits."""
        while self._waiting:
            if not (waiter := self._waiting.popleft()).done():
                return waiter
        return None

    def _handle_failed_start(self, error: SandboxError) -> None:
        """Handles the ``error`` of a worker that cannot start.

        If a grader without isolation has other workers, their number does not grow from now on. Otherwise raises ``error`` in the
        call that has waited longest.
        """
        if self._workers and not self._start.isolation:  # for example, a second import cannot bind the same port
            self.size = len(self._workers)
            text = "rl-accel: the number of grader processes stays at %d, because another cannot start: %s"
            logger.warning(text, self.size, error)
        elif waiter := self._next_waiting():
            waiter.set_exception(error)

    def _grow_soon(self) -> None:
        """Starts workers for the waiting calls: at once, or for a grader without isolation that has a worker, after
        :data:`_WAIT_SECONDS`.
        """
        if self._starting + len(self._workers) == 0 or self._start.isolation:
            self._grow()
        elif self._growth is None:
            self._growth = asyncio.get_running_loop().call_later(_WAIT_SECONDS, self._grow)

    def _grow(self) -> None:
        self._growth = None
        waiting = sum(not waiter.done() for waiter in self._waiting) - self._starting
        count = len(self._workers) + self._starting
        room = most = self.size - count
        if not self._start.isolation:
            if not (self._template and self._workers):
                # the first worker may become the template; most graders need no second
                room = min(room, 1 - self._starting)
            if self._workers and not all(worker.waits for worker in self._workers):
                room = min(room, self._computing - count)
        for _ in range(min(waiting, room)):
            self._starting += 1
            self._do(self._add())
        if room < min(waiting, most) and self._workers:
            self._grow_soon()

    async def _add(self) -> None:
        """Starts a worker: a fork of the template if there is one, else a new process."""
        try:
            if self._template and self._template.gone:
                await self._end(self._template)
                self._template = None
            if self._template:
                worker = await self._template.fork()
            else:
                launched, self._launched = self._launched, None
                worker = await Worker.of(*launched or Worker.launch(self._start, self._payload, self._readable))
            self._start = replace(self._start, reseed=True)
            self._unready.add(worker)
            await self._welcome(worker)
        except SandboxError as error:
            self._handle_failed_start(error)
        except Exception as error:  # such as too many open files; callers would wait for ever
            self._handle_failed_start(SandboxError(f"a worker cannot be started: {error!r}"))
        finally:
            self._starting -= 1
            if self._waiting and not self._closed:
                self._grow_soon()

    async def _welcome(self, worker: Worker) -> None:
        """Waits until a new worker is ready. Keeps a template for later forks, and adds any other worker to the pool."""
        try:
            shared = await worker.wait_ready()
        except BaseException as error:
            await self._end(worker)
            if not isinstance(error, SandboxError):
                raise
            return self._handle_failed_start(error)
        if shared and not self._warned:
            self._warned = True
            logger.warning("rl-accel: untrusted programs share this user's %s", " and ".join(shared))
        self._unready.discard(worker)
        if worker.forks:
            self._template = worker
        else:
            self._workers.add(worker)
            self._free(worker)

    def _do(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _end(self, worker: Worker) -> None:
        try:
            await worker.kill()
        finally:
            self._workers.discard(worker)
            self._unready.discard(worker)
            if self._waiting and not self._closed:
                self._grow_soon()
