"""Pool of processes that call a trusted grader, and that are killed at its time limit. Runs in the process that grades."""

import asyncio
import contextlib
import logging
import math
import os
import pickle
import socket
import statistics
import subprocess
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, Self, TypeVar

import psutil

from rl_accel.errors import RlAccelError
from rl_accel.reward import grader_process
from rl_accel.reward.grader_process import Start, dumps, encode, kill_tree
from rl_accel.reward.limited_executor import ExecutionResult, Limits
from rl_accel.reward.program_process import SIZE, busy_seconds, frame, seconds_waited

logger = logging.getLogger("rl_accel")
T = TypeVar("T")

Provide = Callable[[str, int], tuple[int, bytes | None]]
"""Function that answers :func:`rl_accel.reward.grader_process.ask`."""
_LOST = (ConnectionError, asyncio.IncompleteReadError)
"""Exceptions that reading from a process raises if it has ended."""
_START_SECONDS = 300.0
"""Maximum seconds from the start of a process until it is ready, including all imports of its grader. Chosen by hand."""
_SHORTEST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
"""Seconds after a failed start until the next one, if other processes serve. Doubled with each failure. Chosen by hand."""
_END_SECONDS = 8.0
"""Maximum seconds to wait for the end of a process whose socket was closed. Chosen by hand."""
_HOST = """
import sys
sys.path[:] = eval(sys.argv[1])
from rl_accel.reward.grader_process import main
main(int(sys.argv[-1]))
"""
"""Program of a host. Its arguments are this process's path, the file with the code (for readers of process lists), and the file
descriptor of the socket."""
_WAIT_SECONDS = 0.1
"""Seconds that calls wait for a busy process before the pool starts another one, whose caches are empty."""
_WAITED_FACTOR = 10.0
"""Multiple of the wall limit after which a call is stopped, even if it has waited for a processor. The wall limit itself does not
count such waits."""
_SECOND_LOOK_SECONDS = 0.05
"""Seconds for which a call at its limit may still answer. An answer may have arrived while the event loop was busy."""
_EARLY_FACTOR = 2.0
_EARLY_PROCESSES = 9
"""Extra time of a new process, which may first have to load a model: ``_EARLY_FACTOR`` times the longest call up to the first
correct answer, as a median over the last ``_EARLY_PROCESSES`` processes. Calls that were slow for other reasons do not count."""


class SandboxError(RlAccelError, RuntimeError):
    """Untrusted code cannot run with the requested isolation, or no process can be started."""


@dataclass(eq=False)
class Peer:
    """Process that serves this process, and this process's end of the socket between them.

    Attributes:
        host: process that this process has started: the peer, or a process that runs it. None for a fork of another peer.
        channel, reader, writer: this process's end of the socket, and the streams of this socket.
    """

    host: "subprocess.Popen[bytes] | None"
    channel: socket.socket
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def start(cls, command: Sequence[str], **options: Any) -> Self:
        """Starts a process. ``command`` gets the file descriptor of the socket as its last argument."""
        ours, theirs = socket.socketpair()
        with theirs:
            host = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                **options,
            )
        return await cls.at(ours, host)

    @classmethod
    async def at(cls, channel: socket.socket, host: "subprocess.Popen[bytes] | None" = None) -> Self:
        """Returns the process at the other end of ``channel``."""
        return cls(host, channel, *await asyncio.open_connection(sock=channel))

    def send(self, data: bytes) -> None:
        """Sends a message."""
        self.writer.write(frame(data))

    async def receive(self, most: float = math.inf) -> bytes:
        """Returns the next message. Raises ConnectionError or IncompleteReadError if the process has ended.

        Raises ValueError if the message has more than ``most`` bytes.
        """
        (size,) = SIZE.unpack(await self.reader.readexactly(SIZE.size))
        if size > most:
            raise ValueError(f"a process sent {size} bytes")
        return await self.reader.readexactly(size)

    async def end(self) -> None:
        """Closes the socket, which ends the process and all that it has started, and waits for the end."""
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)  # close() would not suffice, because a fork may hold the socket too
        if self.host:
            try:
                await asyncio.wait_for(asyncio.to_thread(self.host.wait), _END_SECONDS)
            except TimeoutError:
                self.host.kill()
                await asyncio.to_thread(self.host.wait)
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


P = TypeVar("P", bound=Peer)


class Pool(Generic[P]):
    """Processes that serve one call at a time.

    Attributes:
        deaths: number of processes that died without being stopped, other than by an exit of the grader.
    """

    def __init__(self) -> None:
        self.deaths = 0
        self._all: set[P] = set()
        self._idle: list[P] = []
        self._closed = False

    def abandon(self) -> None:
        """Shuts down all sockets, so that the processes end by themselves. For a pool whose event loop is closed already."""
        for peer in self._all:
            with contextlib.suppress(OSError):
                peer.channel.shutdown(socket.SHUT_RDWR)

    async def _end(self, peer: P) -> None:
        try:
            await peer.end()
        finally:
            self._all.discard(peer)


async def finished(work: Awaitable[T]) -> T:
    """Awaits ``work`` to its end, even if this task is cancelled meanwhile. The cancellation takes effect afterwards."""
    task = asyncio.ensure_future(work)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            is_cancelled = True
    current = asyncio.current_task()
    if is_cancelled and current:
        current.cancel()
    return task.result()


@dataclass(eq=False)
class _Process(Peer):
    """Process of the grader.

    Attributes:
        process: the process; None until it is ready.
        proven, longest: kinds of calls (``Limits.kind``) to which the process has given a correct answer, and the seconds of its
            longest call by kind.
    """

    process: psutil.Process | None = None
    proven: set[str] = field(default_factory=set)
    longest: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.next = self._read_next()
        if self.host:  # a child of an ended host may hold the socket open
            loop = asyncio.get_running_loop()
            ended = os.pidfd_open(self.host.pid)

            def shut_down() -> None:
                loop.remove_reader(ended)
                os.close(ended)
                with contextlib.suppress(OSError):
                    self.channel.shutdown(socket.SHUT_RDWR)

            loop.add_reader(ended, shut_down)

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0

    @property
    def gone(self) -> bool:
        """True if the process has ended. Only for an idle process, which sends no messages."""
        return self.next.done() or (self.host is not None and self.host.poll() is not None)

    async def read(self) -> Any:
        """Returns the next message. Raises an exception of :data:`_LOST` if the process has ended."""
        message = await self.next
        self.next = self._read_next()
        return message

    def _read_next(self) -> "asyncio.Future[Any]":
        async def read() -> Any:
            return pickle.loads(await self.receive())

        message = asyncio.ensure_future(read())
        message.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio would log it
        return message

    async def wait_ready(self) -> bool:
        """Waits until the process is ready. Returns True if it is a template: a process that serves no calls but is forked.

        Raises SandboxError if the grader cannot be imported, or the process has ended.
        """
        try:
            word, *rest = await asyncio.wait_for(self.read(), _START_SECONDS)
        except TimeoutError:
            raise SandboxError(f"a process of the grader was not ready within {_START_SECONDS:g} s") from None
        except _LOST as error:
            raise SandboxError("the process of the grader ended while it was imported") from error
        if word != "ready":
            raise SandboxError(rest[0])
        self.process = psutil.Process(rest[0])
        return bool(rest[1])

    async def fork(self) -> "_Process":
        """Forks a process that serves calls from this template. Raises OSError if the template has ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.channel, [b"f"], [theirs.fileno()])
        return await _Process.at(ours)

    async def end(self) -> None:
        """Kills the process and all that it has started, and waits for its end."""
        if self.process is None and self.host and self.host.poll() is None:
            self.process = psutil.Process(self.host.pid)
        if self.process:
            await asyncio.to_thread(kill_tree, self.process)
        await super().end()


class Graders(Pool[_Process]):
    """Pool of processes that call a grader (a function that computes the reward of a response). Use it from one event loop.

    The grader is trusted: only its time is limited. A process imports it once and serves call after call. If a call exceeds its
    wall limit, its process and all that this has started are killed, and another process takes its place. Concurrent calls run in
    several processes, which share no state. They have the environment, ``sys.path``, working folder, output and log format of this
    process. Arguments and return values are pickled, so that a grader cannot change the caller's objects.

    Processes are started while calls wait: the first one at once, further ones after 0.1 seconds, because each has caches of its
    own.

    Args:
        target: import path of the grader, "module:function" or "/path/file.py:function".
        workers: maximum number of calls that run at once; further ones wait in order. None: number of cores of this process.
        arguments: None if ``target`` is the grader. Else ``target`` is a function that returns the grader; each process calls it
            once with these keyword arguments.
        in_thread: True to call the grader in a thread other than the main thread, as stock verl does.
        computing: maximum number of processes while calls mostly compute. While they mostly wait, for example for a server, up to
            ``workers`` processes are started. None: as many as ``workers``.
        environment: environment variables, in addition to those of this process.
        defaults: default keyword arguments of functions ("module.name") in the processes.
        modules: names of modules that each process imports before the grader.
        constants: keyword arguments that are the same objects in all calls, by name. Each process gets them once, at its start.
        folder: working folder during the import; "" for the folder of this process, which calls always have.

    Raises:
        ValueError: ``target`` has another form, or ``workers`` is below 1.
        SandboxError: ``arguments`` or ``constants`` cannot be pickled.
    """

    def __init__(
        self,
        target: str,
        workers: int | None = None,
        *,
        arguments: Mapping[str, Any] | None = None,
        in_thread: bool = False,
        computing: int | None = None,
        environment: Mapping[str, str] | None = None,
        defaults: Mapping[str, dict[str, Any]] | None = None,
        modules: Sequence[str] = (),
        constants: Mapping[str, Any] | None = None,
        folder: str = "",
    ) -> None:
        where, _, name = target.rpartition(":")
        if not where or not name:
            raise ValueError(f"target must be 'module:function' or '/path/file.py:function', found {target!r}")
        self.size = len(os.sched_getaffinity(0)) if workers is None else workers
        if self.size < 1:
            raise ValueError(f"workers must be at least 1, found {workers!r}")
        if "/" in where or where.endswith(".py"):
            where = str(Path(where).absolute())
        super().__init__()
        self._target = target
        self._computing = self.size if computing is None else computing
        self._constants = dict(constants or {})
        self._path = [
            entry for entry in sys.path if isinstance(entry, str)
        ]  # Python ignores others, such as a ``Path``
        self._start = Start(
            target=f"{where}:{name}",
            folder=folder,
            in_thread=in_thread,
            environment=dict(environment or {}),
            logging=_logging_here(),
            imported=_imported_here(),
            modules=tuple(modules),
            defaults=dict(defaults or {}),
            packed=self._packed((None if arguments is None else dict(arguments), self._constants)),
        )
        self._template: _Process | None = None
        self._serving: set[_Process] = set()
        self._waiting: deque[asyncio.Future[_Process]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._starts = 0
        self._start_again_at = 0.0
        self._pause = _SHORTEST_PAUSE_SECONDS
        self._growth: asyncio.Task[None] | None = None
        self._early_seconds: dict[str, deque[float]] = {}

    async def call(
        self,
        kwargs: Mapping[str, Any],
        limits: Limits | None = None,
        args: Sequence[Any] = (),
        provide: Provide | None = None,
    ) -> ExecutionResult:
        """Calls the grader. Cancelling this call kills its process, and all that this has started, at once.

        If a signal ends the process, the grader is called again once. ``provide`` answers questions of the grader during the call,
        see :func:`rl_accel.reward.grader_process.ask`.

        Raises:
            SandboxError: the grader cannot be imported, an argument cannot be pickled, no process can be started, or this pool is
                closed.
        """
        limits = limits or Limits()
        constants = self._constants
        names = [name for name, value in kwargs.items() if name in constants and value is constants[name]]
        sent = {name: value for name, value in kwargs.items() if name not in names}
        message = encode((self._packed((tuple(args), sent)), names))
        for attempt in (1, 2):
            process = await self._take()
            result = await self._call(process, message, limits, provide)
            if result is not None:
                break
            self.deaths += 1
            if attempt == 1:
                logger.warning("rl-accel: a process of %s died, trying again", self._target)
        return result or ExecutionResult("killed", reason="a signal ended two processes that called it")

    async def _call(
        self, process: _Process, message: bytes, limits: Limits, provide: Provide | None
    ) -> ExecutionResult | None:
        """Calls the grader in ``process``. Returns None if a signal has ended the process."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        is_free = False
        process.send(message)
        try:
            answer = await self._answer(process, limits, provide)
            is_free = answer is not None and answer[0] != "ended"
        except _LOST:
            if self._closed:
                raise SandboxError("the graders are closed") from None
            answer = ("ended", "its process ended with -1", b"")
            if process.host:
                status = await asyncio.to_thread(process.host.wait)
                answer = ("ended", f"its process ended with {status}", b"")
        finally:
            if is_free:
                self._free(process)
            else:
                await finished(self._end(process))
        wall = loop.time() - began
        verdict = answer[0] if answer else "timeout"
        logger.debug("rl-accel: process %d of %s: %s after %.1f s", process.pid, self._target, verdict, wall)
        if answer is None:
            return ExecutionResult("timeout", wall=wall, reason="wall limit")
        verdict, reason, packed = answer
        if verdict == "ended":
            is_signal = reason.rpartition(" ")[2].startswith("-")
            return None if is_signal else ExecutionResult("killed", wall=wall, reason=reason)
        return self._proving(process, limits.kind, _result_of(verdict, reason, packed, wall))

    async def _answer(
        self, process: _Process, limits: Limits, provide: Provide | None
    ) -> tuple[str, str, bytes] | None:
        """Returns the answer of the process, or None at the wall limit, of which waits for a processor are no part."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        waited = 0.0
        before: float | None = None
        is_second_look = False
        while True:
            wall = self._raised(process, limits)
            left = began + min(wall + waited, _WAITED_FACTOR * wall) - loop.time()
            if left <= 0 and is_second_look:
                return None
            is_second_look = left <= 0
            pause = _SECOND_LOOK_SECONDS if is_second_look else min(left, limits.check_seconds)
            if (await asyncio.wait({process.next}, timeout=pause))[0]:
                word, first, second = await process.read()
                if word != "ask":
                    return word, first, second
                process.send(encode(provide(first, second) if provide else (-1, None)))
                continue
            now = seconds_waited(process.pid)
            if before is not None:
                waited += max(0.0, now - before)
            before = now

    def _raised(self, process: _Process, limits: Limits) -> float:
        """Returns the present wall limit of a call. It is longer in a process that has not given a correct answer yet."""
        wall, _ = limits.times()
        if limits.kind in process.proven:
            return wall
        of_others = self._early_seconds.get(limits.kind)
        extra = _EARLY_FACTOR * statistics.median(of_others) if of_others else math.inf
        return max(wall, min(wall + extra, limits.full or 0.0))

    def _proving(self, process: _Process, kind: str, result: ExecutionResult) -> ExecutionResult:
        """Adds the function ``prove`` to the first results of a process."""
        if kind in process.proven:
            return result
        process.longest[kind] = max(result.wall, process.longest.get(kind, 0.0))

        def prove() -> None:
            process.proven.add(kind)
            of_processes = self._early_seconds.setdefault(kind, deque(maxlen=_EARLY_PROCESSES))
            of_processes.append(process.longest[kind])

        return replace(result, prove=prove)

    async def close(self) -> None:
        """Ends all processes. Stops running calls, which raise a SandboxError."""
        self._closed = True
        while self._all or self._tasks:
            await asyncio.gather(*map(self._end, list(self._all)), *self._tasks, return_exceptions=True)
        self._idle.clear()
        while self._waiting:
            self._waiting.popleft().set_exception(SandboxError("the graders are closed"))

    async def _take(self) -> _Process:
        if self._closed:
            raise SandboxError("the graders are closed")
        while self._idle:
            process = self._idle.pop()
            if not process.gone:
                return process
            self.deaths += 1  # the process died while idle: no call is to blame
            await self._end(process)
        waiter: asyncio.Future[_Process] = asyncio.get_running_loop().create_future()
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

    def _free(self, process: _Process) -> None:
        """Gives a process to the call that has waited longest, or keeps it idle."""
        if self._waiting and not process.gone:
            self._waiting.popleft().set_result(process)
        else:
            self._idle.append(process)

    async def _grow(self) -> None:
        """Starts processes while calls wait: the first one at once, further ones only after :data:`_WAIT_SECONDS`."""
        loop = asyncio.get_running_loop()
        while self._waiting and not self._closed:
            looked = loop.time()
            busy = {process: busy_seconds(process.pid) for process in self._serving}
            if self._serving or self._starts:
                await asyncio.sleep(_WAIT_SECONDS)
            seconds = loop.time() - looked
            waits = busy and all(busy_seconds(process.pid) - before < seconds / 2 for process, before in busy.items())
            most = self.size if waits else min(self._computing, self.size)
            room = min(most - len(self._serving) - self._starts, len(self._waiting) - self._starts)
            if not (self._template and self._serving):
                room = min(room, 1 - self._starts)  # the first process may become the template
            if self._serving and loop.time() < self._start_again_at:
                room = 0
            for _ in range(room):
                self._starts += 1
                self._do(self._add())

    async def _add(self) -> None:
        """Starts a process, and gives it to a waiting call.

        If that fails, a pool with other processes tries again later. Otherwise, the call that has waited longest gets the error.
        """
        try:
            process = await self._started()
        except Exception as error:  # such as too many open files; callers would wait for ever
            problem = error
            if not isinstance(error, SandboxError):
                problem = SandboxError(f"a process of {self._target} cannot be started: {error!r}")
            if self._closed:
                pass  # close() tells the callers
            elif self._serving:  # for example, a second import cannot bind the same port
                self._start_again_at = asyncio.get_running_loop().time() + self._pause
                self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
                message = "rl-accel: %d processes serve %s for now, because another cannot start: %s"
                logger.warning(message, len(self._serving), self._target, problem)
            elif self._waiting:
                self._waiting.popleft().set_exception(problem)
        else:
            self._pause = _SHORTEST_PAUSE_SECONDS
            self._serving.add(process)
            counts = (len(self._serving), self._target, len(self._waiting))
            logger.debug("rl-accel: %d processes serve %s, %d calls wait", *counts)
            self._free(process)
        finally:
            self._starts -= 1

    async def _started(self) -> _Process:
        """Starts a process and waits until it is ready: a fork of the template if there is one, else a host."""
        if self._template and self._template.gone:
            self.deaths += 1
            await self._end(self._template)
        if self._template is None:
            command = [sys.executable, "-c", _HOST, repr(self._path), grader_process.__file__]
            host = await _Process.start(command)
            host.send(encode(asdict(self._start)))
            self._start = replace(self._start, reseed=True)
            if not await self._is_template(host):
                return host
            self._template = host
        fork = await self._template.fork()
        await self._is_template(fork)
        return fork

    async def _is_template(self, process: _Process) -> bool:
        """Waits until a process is ready. Returns what :meth:`_Process.wait_ready` does."""
        self._all.add(process)
        try:
            return await process.wait_ready()
        except BaseException:
            await self._end(process)
            raise

    def _do(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _end(self, process: _Process) -> None:
        try:
            await super()._end(process)
        finally:
            self._serving.discard(process)
            if process is self._template:
                self._template = None
            if self._waiting and not self._closed and (self._growth is None or self._growth.done()):
                self._growth = self._do(self._grow())

    def _packed(self, arguments: Any) -> bytes:
        try:
            return dumps(arguments)
        except Exception as error:
            raise SandboxError(
                f"{self._target} runs in another process, to which its arguments cannot be sent: {error}"
            ) from error


def _result_of(verdict: str, reason: str, packed: bytes, wall: float) -> ExecutionResult:
    try:
        value = pickle.loads(packed)
    except Exception as error:  # that of a failed call is an exception whose class cannot be imported here
        if verdict == "done":
            reason = f"its value cannot be read: {type(error).__name__}: {error}"
        return ExecutionResult("error", wall=wall, reason=reason)
    if verdict == "done":
        return ExecutionResult("done", value, wall)
    return ExecutionResult("error", wall=wall, reason=reason, error=value)


def _logging_here() -> dict[str, Any]:
    """Returns arguments of ``logging.basicConfig`` that give another process the level and format of this process's log."""
    handlers = logging.getLogger().handlers
    formatters = [handler.formatter for handler in handlers if type(handler.formatter) is logging.Formatter]
    known = [{"format": each._fmt, "datefmt": each.datefmt} for each in formatters if "%(" in (each._fmt or "")]
    return {"level": logging.getLogger().level, **(known[0] if known else {})} if handlers else {}


def _imported_here() -> dict[str, str]:
    """Returns the files of the top-level modules that this process has imported, by name."""
    found = {}
    for name, module in list(sys.modules.items()):
        spec = vars(module).get("__spec__") if isinstance(module, ModuleType) and "." not in name else None
        if isinstance(spec, ModuleSpec) and spec.has_location and spec.name == name and spec.origin:
            found[name] = spec.origin
    return found
