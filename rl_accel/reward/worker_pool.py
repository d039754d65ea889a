"""Pool of warm worker processes that execute programs or call graders. Each request goes to a free worker, through a socket."""

import asyncio
import contextlib
import functools
import json
import logging
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rl_accel.errors import RlAccelError
from rl_accel.reward import worker as worker_files
from rl_accel.reward.execution import ExecutionResult, Limits
from rl_accel.reward.worker import SIZES, Message, Start, WorkerRequest, encode, wait_for

logger = logging.getLogger("rl_accel")

_LOST = (ConnectionError, asyncio.IncompleteReadError, asyncio.TimeoutError)
"""Exceptions that :meth:`Worker.run` raises if the worker has died or does not answer."""
_GRACE_SECONDS = 10.0
"""Seconds after the time limit of an execution by which the worker must have sent a message. Otherwise, the worker is killed.
Chosen by hand."""
_END_SECONDS = 8.0
"""Seconds that :meth:`Worker.kill` waits until a worker has ended by itself. Longer than a worker's own ``END_SECONDS``."""
_START_SECONDS = 300.0
"""Maximum seconds from the start of a worker until it is ready, including all imports of its grader. Chosen by hand."""
_RETRY_PAUSE_SECONDS = 1.0
"""Seconds to wait before a request whose worker died is sent to another worker, which may be dying at the same time."""
_WAIT_SECONDS = 0.1
"""Seconds that calls wait for a busy worker before the pool starts another one, whose caches are empty."""
_EARLY_FACTOR, _EARLY_PROCESSES = 2.0, 9
"""Extra time of a new process of a grader, which may first have to load a model: ``_EARLY_FACTOR`` times the longest call up to the
first correct answer, as a median over the last ``_EARLY_PROCESSES`` processes. A median ignores calls that were slow for other
reasons."""
_SCRIPT = Path(worker_files.__file__)


class SandboxError(RlAccelError, RuntimeError):
    """Untrusted code cannot run with the requested isolation, or no worker process can be started."""


def choose_isolation(wanted: str) -> str:
    """Returns ``wanted``, or for "auto" the best isolation that works on this machine: "bubblewrap", else "process".

    Raises ValueError for other words, and SandboxError if bubblewrap is wanted and does not work.
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
        shutil.which("bwrap") or "bwrap",  # the environment of workers has another PATH
        *("--dev", "/dev", "--proc", "/proc", "--tmpfs", "/dev/shm", "--tmpfs", "/tmp", "--tmpfs", "/var/tmp"),
        *(word for path in shown for word in ("--ro-bind-try", path, path)),  # last: an interpreter may lie below /tmp
        *("--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--as-pid-1"),
        *("--die-with-parent", "--new-session", "--"),
    ]


def _library_folders() -> list[str]:
    return [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]


def _temporary_folder(isolation: str) -> str:
    """Returns Python's folder for temporary files, or /tmp if programs under test could not enter that folder."""
    folder = Path(tempfile.gettempdir()).resolve()
    is_closed = os.geteuid() == 0 and not all(part.stat().st_mode & 0o001 for part in (folder, *folder.parents))
    return "/tmp" if is_closed or isolation == "bubblewrap" else str(folder)


@dataclass(eq=False)
class Worker:
    """Client of one worker process, which executes requests one at a time.

    Attributes:
        process: process that supervises the worker (its reaper, or bubblewrap). None for a worker that was forked from a template.
        channel, reader, writer: this process's end of the socket to the worker, and the streams of this socket.
        renews: True until the worker is ready, both after its start and while it replaces its process.
        waits: True if recent executions mostly waited for something other than a processor, by the worker's last message.
        proven, longest: kinds of calls (``Limits.kind``) to which the worker's current process has given a correct answer, and the
            seconds of its longest call by kind.
        answer: future with the return value of :meth:`run` for the latest execution; None before the first execution.
        due: time by which the worker must send its next message, in seconds of the event loop's clock.
    """

    process: "subprocess.Popen[bytes] | None"
    channel: socket.socket
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    renews: bool = True
    waits: bool = False
    proven: set[str] = field(default_factory=set, init=False)
    longest: dict[str, float] = field(default_factory=dict, init=False)
    answer: "asyncio.Future[tuple[ExecutionResult, bytes]] | None" = field(default=None, init=False)
    due: float = field(default=0.0, init=False)

    @staticmethod
    def launch(
        start: Start, payload: bytes, readable: Sequence[str]
    ) -> "tuple[subprocess.Popen[bytes], socket.socket]":
        """Starts a worker process. Returns the process that supervises it, and our end of the socket to it."""
        ours, theirs = socket.socketpair()
        ours.setblocking(True)  # code of the user may have called socket.setdefaulttimeout
        command, environment = [sys.executable, str(_SCRIPT), str(theirs.fileno())], None
        if start.isolation:
            command.insert(1, "-I")
            libraries = ":".join(_library_folders())
            environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "LD_LIBRARY_PATH": libraries}
        if start.isolation == "bubblewrap":
            command = [*_bubblewrap(readable), *command]
        shown = subprocess.DEVNULL if start.isolation else None
        with theirs:
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
        with contextlib.suppress(ConnectionError):  # the worker has died, which wait_ready says
            ours.sendall(encode(asdict(start), payload))
        return process, ours

    @classmethod
    async def of(cls, process: "subprocess.Popen[bytes] | None", channel: socket.socket) -> "Worker":
        """Returns a client of the worker at the other end of the socket ``channel``. Call :meth:`wait_ready` next."""
        return cls(process, channel, *await asyncio.open_connection(sock=channel))

    async def fork(self) -> "Worker":
        """Forks a new worker from this template (a worker that has imported the grader and takes no calls). Returns the new worker.

        Raises OSError if the template has died.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._send({"fork": True})  # sent at once: a template gets no other messages, so the buffer is empty
            socket.send_fds(self.channel, [b"f"], [theirs.fileno()])
        return await Worker.of(None, ours)

    async def wait_ready(self) -> Message:
        """Waits until the worker is ready. Returns its reply to :class:`~rl_accel.reward.worker.Start`.

        Raises SandboxError if the worker cannot start, for example because an import fails. Call :meth:`kill` then.
        """
        try:
            message, _ = await asyncio.wait_for(self._read(), _START_SECONDS)
        except _LOST as error:
            raise SandboxError(f"a worker was not ready within {_START_SECONDS:g} s, or died") from error
        if message["problem"]:
            raise SandboxError(message["problem"])
        self.renews = False
        return message

    @property
    def gone(self) -> bool:
        """True if the worker has died, or its supervising process has ended."""
        return self.reader.at_eof() or (self.process is not None and self.process.poll() is not None)

    async def run(
        self, limits: Limits, request: WorkerRequest, payload: bytes, extra: Callable[[], float] = lambda: 0.0
    ) -> tuple[ExecutionResult, bytes]:
        """Sends a request to the worker. Returns the result, and the pickled value or exception of the grader, or b"".

        If cancelled, call :meth:`stop` or :meth:`kill` next. ``extra`` returns the seconds by which the time limits are now to be
        raised, up to ``limits.full``. Raises an exception of :data:`_LOST` if the worker has died or does not answer.
        """
        began = asyncio.get_running_loop().time()

        def raised(*times: float) -> dict[str, float]:
            wall, cpu = (max(seconds, min(seconds + extra(), limits.full or 0.0)) for seconds in times)
            return {"wall": wall, "cpu": cpu}

        sent = raised(limits.wall, limits.cpu)
        self._send(asdict(replace(request, limits=request.limits | sent)), payload)
        self._expect_message(by=began + sent["wall"])
        self.answer = asyncio.ensure_future(self._wait())
        # Reads an exception of the future. A cancelled caller would not read it, and asyncio logs exceptions that nobody reads.
        self.answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())
        while not (await asyncio.wait([self.answer], timeout=min(limits.check_seconds, _GRACE_SECONDS)))[0]:
            if asyncio.get_running_loop().time() >= self.due:
                raise TimeoutError
            if (changed := raised(*limits.times())) != sent:
                sent = changed
                self._send(sent)
                self._expect_message(by=began + sent["wall"])
        return self.answer.result()

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
        """Sets :attr:`due` to :data:`_GRACE_SECONDS` after the time ``by`` or the current time, whichever is later."""
        self.due = max(by, asyncio.get_running_loop().time()) + _GRACE_SECONDS

    async def _wait(self) -> tuple[ExecutionResult, bytes]:
        while True:
            message, payload = await self._read()
            self.waits = message.pop("waits", self.waits)
            if "alive" not in message:
                self.renews = message.pop("renews", False)
                if self.renews:
                    self.proven, self.longest = set(), {}
                return ExecutionResult(**message), payload
            self._expect_message(by=self.due - _GRACE_SECONDS)

    async def _read(self) -> tuple[Message, bytes]:
        head_size, size = SIZES.unpack(await self.reader.readexactly(SIZES.size))
        return json.loads(await self.reader.readexactly(head_size)), await self.reader.readexactly(size)


class WorkerPool:
    """Pool of at most ``size`` worker processes for one grader, or for programs under test. Use it from one event loop only.

    Workers are started while calls wait: the first ones at once, further ones after 0.1 seconds, because each process of a grader
    has caches of its own.

    Args:
        size: maximum number of workers; None: number of cores that this process may use.
        start, payload: first message to each worker, and the payload of this message; see :class:`~rl_accel.reward.worker.Start`.
        readable: files and folders that bubblewrap shows read-only, in addition to the interpreter and the system's programs.
        computing: maximum number of workers for a grader without isolation while any of them mostly computes. If all mostly wait,
            for example for a server, the maximum is ``size``. None: always ``size``.

    Attributes:
        deaths: number of workers that died, or that were killed because they did not answer.
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
        self._early_seconds: dict[str, deque[float]] = {}
        self._growth: asyncio.Task[None] | None = None
        self._closed = False
        self._warned = False

    def warm_up(self) -> None:
        """Starts the first worker and waits until it is ready or has failed. Needs no event loop."""
        try:
            self._launched = Worker.launch(self._start, self._payload, self._readable)
        except OSError as error:
            raise SandboxError(f"a worker cannot be started: {error}") from error
        wait_for([self._launched[1].fileno()], _START_SECONDS)

    async def _run(self, limits: Limits, request: WorkerRequest, payload: bytes = b"") -> tuple[ExecutionResult, bytes]:
        """Runs a request on the next free worker. Returns the same as :meth:`Worker.run`.

        If the worker dies, runs the request on another one. If that dies too, the verdict is "killed". Raises SandboxError if no
        worker can be started, or if the pool is closed.
        """
        for attempt in (1, 2):
            worker = await self._take()
            try:
                answer = await self._run_on(worker, limits, request, payload)
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

    async def _run_on(
        self, worker: Worker, limits: Limits, request: WorkerRequest, payload: bytes
    ) -> tuple[ExecutionResult, bytes]:
        """Runs a request on ``worker``, with more time in a new process of a grader, which may first have to load a model.

        A process is new until it has given a correct answer to a call of the same kind.
        """
        kind, proven, longest = limits.kind, worker.proven, worker.longest
        if self._start.isolation or kind in proven:
            return await worker.run(limits, request, payload)
        seconds_of_others = self._early_seconds.setdefault(kind, deque(maxlen=_EARLY_PROCESSES))

        def prove() -> None:
            proven.add(kind)
            seconds_of_others.append(longest[kind])

        def extra() -> float:
            return _EARLY_FACTOR * statistics.median(seconds_of_others) if seconds_of_others else math.inf

        result, body = await worker.run(limits, request, payload, extra)
        longest[kind] = max(result.wall - result.waited, longest.get(kind, 0.0))
        return replace(result, prove=prove), body

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
        while self._waiting:
            self._waiting.popleft().set_exception(SandboxError("the sandbox is closed"))

    def abandon(self) -> None:
        """Shuts down the sockets of all workers, so that they end by themselves. For a pool whose event loop is closed already."""
        channels = [worker.channel for worker in (*self._workers, *self._unready, self._template) if worker]
        for channel in [*channels, self._launched[1]] if self._launched else channels:
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)

    async def _stop(self, worker: Worker) -> None:
        """Stops the execution of a worker and frees the worker, or kills the worker if that takes too long."""
        try:
            await worker.stop()
        except _LOST:
            await self._end(worker)
        else:
            self._free(worker)

    async def _take(self) -> Worker:
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
        if self._growth is None or self._growth.done():
            self._growth = self._do(self._grow())
        try:
            await asyncio.wait([waiter])
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif not waiter.exception():
                self._free(waiter.result())
            raise
        return waiter.result()

    def _free(self, worker: Worker) -> None:
        """Gives a worker to the call that has waited longest, or keeps it idle.

        If the worker is replacing its process, first waits until the new process is ready.
        """
        if worker.renews:
            self._do(self._welcome(worker))
        elif self._waiting:
            self._waiting.popleft().set_result(worker)
        else:
            self._idle.append(worker)

    def _handle_failed_start(self, error: SandboxError) -> None:
        """Handles a worker that could not start. A trusted grader that has other workers continues with these only.

        Otherwise, the call that has waited longest gets ``error``.
        """
        if self._workers and not self._start.isolation:  # for example, a second import cannot bind the same port
            self.size = len(self._workers)
            message = "rl-accel: the number of grader processes stays at %d, because another cannot start: %s"
            logger.warning(message, self.size, error)
        elif self._waiting:
            self._waiting.popleft().set_exception(error)

    async def _grow(self) -> None:
        """Starts workers while calls wait: the first ones at once, further ones only after :data:`_WAIT_SECONDS`."""
        while self._waiting and not self._closed:
            if self._workers or self._starting:
                await asyncio.sleep(_WAIT_SECONDS)
            count = len(self._workers) + self._starting
            room = self.size - count
            if not self._start.isolation:
                if not (self._template and self._workers):
                    # the first worker may become the template; most graders need no second
                    room = min(room, 1 - self._starting)
                if self._workers and not all(worker.waits for worker in self._workers):
                    room = min(room, self._computing - count)
            for _ in range(min(len(self._waiting) - self._starting, room)):
                self._starting += 1
                self._do(self._add())

    async def _add(self) -> None:
        """Starts a worker: a fork of the template (a worker that has imported the grader) if there is one, else a new process."""
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

    async def _welcome(self, worker: Worker) -> None:
        """Waits until a worker is ready, then adds it to the pool or keeps it as the template.

        A template takes no calls. It is forked for each further worker.
        """
        try:
            ready = await worker.wait_ready()
        except BaseException as error:
            await self._end(worker)
            if not isinstance(error, SandboxError):
                raise
            return self._handle_failed_start(error)
        if ready["shared"] and not self._warned:
            self._warned = True
            logger.warning("rl-accel: untrusted programs share this user's %s", " and ".join(ready["shared"]))
        self._unready.discard(worker)
        if "forks" in ready:
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
