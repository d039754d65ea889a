"""One warm worker: its process, and our end of its socket."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_accel.errors import RlAccelError
from rl_accel.reward.bubblewrap import WORKER
from rl_accel.reward.limit_updates import LimitUpdates

Header = dict[str, Any]
Answer = tuple[Header, bytes]
LOST = (ConnectionError, asyncio.IncompleteReadError, asyncio.TimeoutError)
"""What a call of a worker raises that has died, or does not answer."""
_GRACE_SECONDS = 10.0
"""A worker that has not been heard so long after the wall limit is ended itself, with all that descends from it."""
_END_SECONDS = 8.0
"""A worker ends its program and itself in this time, or its reaper does it; then the reaper is killed."""
_LINE_BYTES = 64 << 20


class SandboxError(RlAccelError, RuntimeError):
    """A worker could not be started."""


@dataclass(frozen=True)
class Setup:
    """How a worker is started.

    Args:
        before: words before the command, bubblewrap's for example.
        flags: the interpreter's.
        environment: all of its environment; None: ours, and our standard output and folder too.
        message, payload: the first message, see :func:`rl_accel.reward.worker.start.main`.
        seconds: it must be ready in this time.
    """

    before: tuple[str, ...]
    flags: tuple[str, ...]
    environment: Mapping[str, str] | None
    message: Header
    payload: bytes = b""
    seconds: float = 30.0


class WorkerProcess:
    """A worker that takes orders, one at a time.

    Attributes:
        process: its reaper, or what is before it.
        shared: what its programs share with us, of "network" and "processes"; None until it is ready.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        self.shared: tuple[str, ...] | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._answer: asyncio.Future[Answer] | None = None
        self._count = 0

    @classmethod
    async def spawn(cls, setup: Setup) -> "WorkerProcess":
        """Start one; :meth:`ready` must follow.

        Raises:
            SandboxError: it cannot be started.
        """
        ours, theirs = socket.socketpair()
        shown = None if setup.environment is None else subprocess.DEVNULL
        with theirs:
            try:
                process = subprocess.Popen(
                    [*setup.before, sys.executable, *setup.flags, str(WORKER), str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env=setup.environment,
                    cwd=None if setup.environment is None else "/",
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
        worker._send(setup.message, setup.payload)
        return worker

    async def ready(self, seconds: float) -> None:
        """Wait until it is ready for orders; if that fails, :meth:`kill` must follow.

        Raises:
            SandboxError: the message says why it is not, such as what its import raised.
        """
        try:
            ready, _ = await asyncio.wait_for(self._read(), seconds)
        except LOST as error:
            raise SandboxError(f"a worker was not ready within {seconds:g} s, or died") from error
        if ready["problem"]:
            raise SandboxError(ready["problem"])
        self.shared = tuple(ready["shared"])

    @property
    def gone(self) -> bool:
        """Whether it, or its reaper, has died."""
        return self._reader.at_eof() or self.process.poll() is not None

    async def run(self, order: Header, payload: bytes, wall: float, updates: LimitUpdates | None = None) -> Answer:
        """Send an order and wait for its answer; if this is cancelled, :meth:`stop` must follow, or :meth:`kill`.

        ``updates`` gives it other limits meanwhile, not above those of the order.

        Raises:
            ConnectionError, asyncio.IncompleteReadError, asyncio.TimeoutError: the worker has died, or is stuck.
        """
        self._count += 1
        self._send({"run": self._count, **order}, payload)
        self._answer = asyncio.ensure_future(self._wait(wall))
        self._answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())  # nobody else may ask
        with updates.subscribed(self._change) if updates else contextlib.nullcontext():
            return await asyncio.shield(self._answer)

    async def stop(self) -> None:
        """Have the worker stop what it runs, and wait until that is done.

        Raises: as :meth:`run`.
        """
        self._send({"stop": self._count}, b"")
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
        self._send({"change": self._count, "wall": wall, "cpu": cpu}, b"")

    def _send(self, header: Header, payload: bytes) -> None:
        if payload:
            header = {**header, "bytes": len(payload)}
        self._writer.write(json.dumps(header).encode() + b"\n" + payload)

    async def _wait(self, wall: float) -> Answer:
        seconds = wall + _GRACE_SECONDS
        while True:
            header, payload = await asyncio.wait_for(self._read(), seconds)
            if "alive" not in header:
                return header, payload
            seconds = _GRACE_SECONDS

    async def _read(self) -> Answer:
        header: Header = json.loads(await self._reader.readuntil(b"\n"))
        return header, await self._reader.readexactly(header.get("bytes", 0))
