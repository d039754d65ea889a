"""A worker: the process that watches an execution, and at a limit kills the execution with all processes started by it.

For untrusted code the worker forks one process per execution (``server``). A trusted grader stays in one process that serves call
after call and is replaced after a limit has stopped it (``keeper``). This file defines the messages between worker and trainer:
JSON followed by raw bytes (the payload). It is also the script that starts a worker, ``python <this file> <socket descriptor>``.
A worker imports the standard library only, so that a fork has the modules that programs usually import and none of the trainer.
"""

import importlib
import importlib.util
import json
import os
import pickle
import select
import socket
import struct
import sys
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
SIZES = struct.Struct("!QQ")
"""Header of a message: lengths of JSON and payload, in bytes."""


@dataclass(frozen=True)
class Start:
    """First message to a worker. Its payload holds pickled arguments if ``target`` must be called to get the grader.

    The worker's first message has two keys. ``problem`` says why the worker cannot serve, such as an error in the import of the
    target; it is "" if all is well. ``shared`` lists what untrusted code shares with the trainer: "network", "processes", "files".

    Attributes:
        isolation: "process" or "bubblewrap" for untrusted code; "" for a trusted grader, which has time limits only.
        folder: parent of the temporary folder in which untrusted code runs.
        target: the grader, "module:function" or "/path/file.py:function"; "" to run programs.
        path: the worker's ``sys.path``; None keeps the default.
        in_thread: call a trusted grader outside the main thread, as frameworks do that call graders in an executor.
        environment: variables for a trusted grader, in addition to the trainer's.
        reseed: seed random numbers anew, so that they differ from those of earlier processes of the same grader.
        setup: "module:function", called with ``environment`` before a process imports a trusted grader.
    """

    isolation: str
    folder: str = ""
    target: str = ""
    path: list[str] | None = None
    in_thread: bool = False
    reseed: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    setup: str = ""


@dataclass(frozen=True)
class Order:
    """Request to execute a program on a test case, or to call the grader with the payload (pickled keyword arguments).

    A later message ``{"stop": True}`` stops the execution; ``{"wall": ..., "cpu": ...}`` sets new limits. The answer has the fields
    of an :class:`rl_accel.reward.execution.ExecutionResult`; its payload is the pickled value or exception. After an answer with
    ``renews`` the worker replaces its process, and takes no request until it has sent another message like its first.

    Attributes:
        limits: limits by name, see :class:`rl_accel.reward.execution.Limits`.
        code, case: source of the program, and fields of its :class:`rl_accel.reward.sandbox.Case`.
    """

    limits: dict[str, float]
    code: str = ""
    case: dict[str, str] = field(default_factory=dict)


class Gone(Exception):
    """The trainer has closed the socket, or the reaper of this process has ended."""


class Channel:
    """The worker's end of the socket.

    Args:
        control: the socket.
        reaper: pidfd of the process that supervises this one. If the reaper exits, the socket counts as closed.
    """

    def __init__(self, control: socket.socket, reaper: int | None = None) -> None:
        self.control = control
        self.descriptors = {control.fileno()} if reaper is None else {control.fileno(), reaper}
        self.reaper = reaper
        self._poll = select.poll()
        for descriptor in self.descriptors:
            self._poll.register(descriptor, select.POLLIN)

    def next(self) -> tuple[Message, bytes]:
        """Returns the next message and its payload. Waits if necessary.

        Raises:
            Gone: no further message can come.
        """
        if self.reaper in {descriptor for descriptor, _ in self._poll.poll()}:
            raise Gone
        head_size, size = SIZES.unpack(self._receive(SIZES.size))
        return json.loads(self._receive(head_size)), self._receive(size)

    def send(self, message: Message, payload: bytes = b"") -> None:
        """Sends a message.

        Raises:
            Gone: the other end is closed.
        """
        try:
            self.control.sendall(encode(message, payload))
        except OSError as error:
            raise Gone from error

    def _receive(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                received = self.control.recv(min(size - len(data), 1 << 20))
            except OSError as error:
                raise Gone from error
            if not received:
                raise Gone
            data += received
        return bytes(data)


def dumps(value: Any) -> bytes:
    """Returns ``value`` pickled; by cloudpickle if pickle fails or ``value`` needs this process's ``__main__``.

    Raises:
        Exception: neither can pickle ``value``.
    """
    try:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        if b"__main__" not in data:
            return data
    except Exception as error:
        cause: Exception | None = error
    else:
        cause = None
    try:
        import cloudpickle
    except ImportError:
        if cause is None:
            return data
        raise cause from None
    plain: bytes = cloudpickle.dumps(value)
    return plain


def encode(message: Message, payload: bytes) -> bytes:
    """Returns the bytes of a message: header, JSON, payload."""
    head = json.dumps(message).encode()
    return SIZES.pack(len(head), len(payload)) + head + payload


def decode(data: bytearray) -> tuple[Message, bytes]:
    """Returns the message and payload in ``data``, one complete message from :func:`encode`."""
    end = SIZES.size + SIZES.unpack_from(data)[0]
    return json.loads(data[SIZES.size : end]), bytes(memoryview(data)[end:])


def _main() -> None:
    """Serves requests. Loads this folder as a package of another name, lest a program's ``import watch`` find our module."""
    folder = os.path.dirname(os.path.abspath(__file__))
    spec = importlib.util.spec_from_file_location("rl_accel_worker", __file__, submodule_search_locations=[folder])
    if spec is None or spec.loader is None:
        raise ImportError(f"no worker in {folder}")
    package = importlib.util.module_from_spec(spec)
    sys.modules["rl_accel_worker"] = package
    spec.loader.exec_module(package)
    importlib.import_module("rl_accel_worker.server").main(int(sys.argv[1]))


if __name__ == "__main__":
    _main()
