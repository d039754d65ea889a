"""A worker: the warm process that forks for each execution, watches the fork, and leaves nothing of it behind.

This file holds the messages between a worker and the trainer: a line of JSON, and as many raw bytes after it as its ``bytes`` says.
It is also the script that starts a worker, ``python <this file> <number of a socket>``. A worker imports the standard library only,
so that a fork has what programs usually import and nothing of the trainer.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import select
import socket
import sys
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Start:
    """The first message to a worker. Its bytes are the pickled arguments of ``target``, if it is to be called with any.

    Attributes:
        isolation: "process" or "bubblewrap" for untrusted code; "" for a trusted grader, of which only times are limited.
        folder: made by the worker, for what untrusted code writes.
        target: the grader, "module:function" or "/path/file.py:function"; "" if programs are run.
        path: ``sys.path``; None leaves it as it is.
        preload: modules to import.
    """

    isolation: str
    folder: str = ""
    target: str = ""
    path: list[str] | None = None
    preload: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Ready:
    """The worker's first message.

    Attributes:
        problem: why it cannot work, such as what the import of its target raised; "" if it can.
        shared: what untrusted code shares with the trainer, of "network", "processes" and "files".
    """

    problem: str = ""
    shared: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Order:
    """What to execute: a program on a case, or else the grader, whose pickled keyword arguments are the message's bytes.

    Attributes:
        run: number of the order; a later message ``{"stop": run}`` stops it, ``{"change": run, "wall": ..., "cpu": ...}`` changes
            its limits.
        limits: by name, see :class:`rl_accel.reward.execution.Limits`.
        code, case: the program, and the fields of its :class:`rl_accel.reward.execution.Case`.
    """

    run: int
    limits: dict[str, float]
    code: str = ""
    case: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What came of an order. The message's bytes are the report of the execution itself.

    Attributes:
        stopped: the limit that stopped it, or "cancelled"; "" if it ended by itself.
        status: as ``os.waitpid`` gave it, if it ended by itself.
        wall, cpu: seconds, of all its processes.
        waited: seconds of ``wall`` in which it was ready and had no processor.
        output: the beginning of what it printed.
        printed: all that it printed, if that is compared with an expected output.
    """

    stopped: str
    status: int
    wall: float
    cpu: float
    waited: float
    output: str
    printed: str


class Gone(Exception):
    """The trainer, or the reaper of this process, is not there any more."""


class Channel:
    """The worker's end of the socket.

    Args:
        control: the socket.
        reaper: a pidfd of the process that looks after this one, or -1. Its end counts as the end of the socket.
    """

    def __init__(self, control: socket.socket, reaper: int = -1) -> None:
        self.control = control
        self.reaper = reaper
        self._rest = bytearray()
        self._poll = select.poll()
        self.register(self._poll)

    def register(self, poll: "select.poll") -> None:
        """Have ``poll`` wake for messages, and when the reaper ends."""
        poll.register(self.control, select.POLLIN)
        if self.reaper >= 0:
            poll.register(self.reaper, select.POLLIN)

    def next(self) -> tuple[Message, bytes]:
        """Wait for a message.

        Raises:
            Gone: there will be none.
        """
        while b"\n" not in self._rest:
            self._receive()
        line, _, self._rest = self._rest.partition(b"\n")
        message: Message = json.loads(line)
        size = message.pop("bytes", 0)
        while len(self._rest) < size:
            self._receive()
        payload = bytes(self._rest[:size])
        del self._rest[:size]
        return message, payload

    def send(self, message: Message, payload: bytes = b"") -> None:
        """Send a message.

        Raises:
            Gone: nobody reads it.
        """
        try:
            self.control.sendall(encode(message, payload))
        except OSError as error:
            raise Gone from error

    def interrupted(self, ready: set[int]) -> bool:
        """Whether a message has come. ``ready``: the descriptors that a poll returned.

        Raises:
            Gone: there will be none.
        """
        if self.reaper in ready:
            raise Gone
        if not self._rest and self.control.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._take(self.control.recv(1 << 16, socket.MSG_DONTWAIT))
        return bool(self._rest)

    def _receive(self) -> None:
        if self.reaper in {descriptor for descriptor, _ in self._poll.poll()}:
            raise Gone
        try:
            self._take(self.control.recv(1 << 20))
        except OSError as error:
            raise Gone from error

    def _take(self, received: bytes) -> None:
        if not received:
            raise Gone
        self._rest += received


def encode(message: Message, payload: bytes) -> bytes:
    """Return a message as it is sent."""
    return json.dumps({**message, "bytes": len(payload)}).encode() + b"\n" + payload


def _main() -> None:
    """Serve. This folder is loaded as a package of another name: a program's own ``import watch`` must not find ours."""
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != folder]
    spec = importlib.util.spec_from_file_location("rl_accel_worker", __file__, submodule_search_locations=[folder])
    if spec is None or spec.loader is None:
        raise ImportError(f"no worker in {folder}")
    package = importlib.util.module_from_spec(spec)
    sys.modules["rl_accel_worker"] = package
    spec.loader.exec_module(package)
    importlib.import_module("rl_accel_worker.server").main(int(sys.argv[1]))


if __name__ == "__main__":
    _main()
