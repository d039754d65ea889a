"""A worker: the process that watches an execution, and ends it and all it started at a limit.

For untrusted code it forks one process for each execution (``server``); a trusted grader lives on, in a process that serves call
after call and is replaced after a limit has stopped it (``keeper``). This file holds the messages between a worker and the trainer,
each of them JSON and raw bytes after it. It is also the script that starts a worker, ``python <this file> <number of a socket>``.
A worker imports the standard library only, so that a fork has what programs usually import and nothing of the trainer.
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
"""Before each message: the lengths of its JSON and of its bytes."""


@dataclass(frozen=True)
class Start:
    """The first message to a worker. Its bytes are the pickled arguments of ``target``, if it is to be called with any.

    The worker's first message says what is the ``problem``, such as what the import of its target raised, or "", and what untrusted
    code has ``shared`` with the trainer, of "network", "processes" and "files".

    Attributes:
        isolation: "process" or "bubblewrap" for untrusted code; "" for a trusted grader, of which only times are limited.
        folder: where a worker makes the folder that untrusted code runs in.
        target: the grader, "module:function" or "/path/file.py:function"; "" if programs are run.
        path: ``sys.path``; None leaves it as it is.
        in_thread: call a trusted grader in a thread that is not the main one, as frameworks do that call graders in an executor.
        environment: variables that a trusted grader has beside those of the trainer.
        reseed: draw other random numbers than a process that has imported the same grader before.
        setup: "module:function", called with ``environment`` in each process of a trusted grader before the first call.
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
    """What to execute: a program on a case, or else the grader, whose pickled keyword arguments are the message's bytes.

    A later message ``{"stop": True}`` stops it; ``{"wall": ..., "cpu": ...}`` are new limits. The answer has the fields of an
    :class:`rl_accel.reward.execution.ExecutionResult`; its bytes are the value, or the exception, pickled. With ``renews`` the
    worker replaces its process: it takes no order before it has said that it is ready, in a message like its first.

    Attributes:
        limits: by name, see :class:`rl_accel.reward.execution.Limits`.
        code, case: the program, and the fields of its :class:`rl_accel.reward.sandbox.Case`.
    """

    limits: dict[str, float]
    code: str = ""
    case: dict[str, str] = field(default_factory=dict)


class Gone(Exception):
    """The trainer, or the reaper of this process, is not there any more."""


class Channel:
    """The worker's end of the socket.

    Args:
        control: the socket.
        reaper: a pidfd of the process that looks after this one. Its end counts as the end of the socket.
    """

    def __init__(self, control: socket.socket, reaper: int | None = None) -> None:
        self.control = control
        self.descriptors = {control.fileno()} if reaper is None else {control.fileno(), reaper}
        self.reaper = reaper
        self._poll = select.poll()
        for descriptor in self.descriptors:
            self._poll.register(descriptor, select.POLLIN)

    def next(self) -> tuple[Message, bytes]:
        """Wait for a message.

        Raises:
            Gone: there will be none.
        """
        if self.reaper in {descriptor for descriptor, _ in self._poll.poll()}:
            raise Gone
        head_size, size = SIZES.unpack(self._receive(SIZES.size))
        return json.loads(self._receive(head_size)), self._receive(size)

    def send(self, message: Message, payload: bytes = b"") -> None:
        """Send a message.

        Raises:
            Gone: nobody reads it.
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
    """Return ``value`` pickled: by cloudpickle what pickle cannot, and what another process would not find in its ``__main__``.

    Raises:
        Exception: neither can.
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
    """Return a message as it is sent."""
    head = json.dumps(message).encode()
    return SIZES.pack(len(head), len(payload)) + head + payload


def decode(data: bytearray) -> tuple[Message, bytes]:
    """Return the message that is ``data``, whole, as :func:`encode` makes it."""
    end = SIZES.size + SIZES.unpack_from(data)[0]
    return json.loads(data[SIZES.size : end]), bytes(memoryview(data)[end:])


def _main() -> None:
    """Serve. This folder is loaded as a package of another name: a program's own ``import watch`` must not find ours."""
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
