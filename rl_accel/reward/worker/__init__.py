"""Worker process: watches an execution, and at a limit kills it with all processes that it has started.

An execution is a run of a program under test, or a call of a grader. For untrusted code, the worker forks one process per execution
(see ``server``). A trusted grader stays in one process, which serves call after call and is replaced after a limit has stopped it
(see ``keeper``).

This file defines the messages between the worker and the trainer process, which sends the requests. It is also the script that
starts a worker: ``python <this file> <socket descriptor>``. A worker imports the standard library only, so that a program under
test finds the modules that programs usually import, and no module of the trainer process.
"""

import contextlib
import importlib
import json
import os
import pickle
import select
import socket
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
SIZES = struct.Struct("!QQ")
"""Header of a message: the lengths in bytes of its JSON text and of the raw bytes that follow the text (the payload)."""


@dataclass(frozen=True)
class Start:
    """First message from the trainer process to a worker: settings of the worker.

    Its payload for a grader is a pickled pair: the keyword arguments of the function that returns the grader (None if ``target`` is
    the grader itself), and the keyword arguments of the grader that are the same in all calls.

    The reply of the worker has the keys ``problem`` (the reason why the worker cannot serve, or "") and ``shared`` (what untrusted
    code shares with the trainer process: "network", "processes", "files"). It also has the key ``forks`` if the worker is a
    template, which serves no requests but is forked for each further worker.

    Attributes: as in :class:`rl_accel.reward.sandbox.Graders`, and
        isolation: "process" or "bubblewrap" for untrusted code; "" for a trusted grader, which has time limits only.
        folder: for untrusted code, folder in which the worker makes its temporary folder.
        target: "" to run programs.
        path: ``sys.path`` of the worker; None keeps the default.
        reseed: True to seed random numbers anew, so that they differ from those of earlier processes of the same grader.
        logging: arguments of ``logging.basicConfig`` for a process of a trusted grader; {} leaves Python's logging as it is.
    """

    isolation: str
    folder: str = ""
    target: str = ""
    path: list[str] | None = None
    in_thread: bool = False
    reseed: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    setup: str = ""
    logging: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerRequest:
    """Request to a worker: execute a program on a test case, or call the grader with the pickled arguments in the payload.

    During the execution, the message ``{"stop": True}`` stops it, and ``{"wall": ..., "cpu": ...}`` sets new limits in seconds.

    The worker's answer has the fields of an :class:`rl_accel.reward.execution.ExecutionResult`. Its payload is the pickled value or
    exception of the grader. If the answer contains ``renews``, the worker is replacing the process of the grader: it sends the
    reply to :class:`Start` again before it takes the next request.

    Attributes:
        limits: resource limits by name, see :class:`rl_accel.reward.execution.Limits`.
        code: source code of the program; "" for a grader.
        case: fields of a :class:`rl_accel.reward.sandbox.Case`; {} for a grader.
    """

    limits: dict[str, float]
    code: str = ""
    case: dict[str, str] = field(default_factory=dict)


class PeerClosed(Exception):
    """The trainer process has closed the socket, or the reaper (supervising process) has ended."""


class Channel:
    """The worker's end of the socket to the trainer process, which sends the requests.

    ``reaper`` is a pidfd (file descriptor) of the supervising process. If that process ends, the socket counts as closed.
    """

    def __init__(self, control: socket.socket, reaper: int | None = None) -> None:
        self.control = control
        control.setblocking(True)  # code of the user may have called socket.setdefaulttimeout
        self.descriptors = {control.fileno()} if reaper is None else {control.fileno(), reaper}
        self.reaper = reaper

    def next(self) -> tuple[Message, bytes]:
        """Returns the next message and its payload. Raises PeerClosed if the other end is closed, or the process
        ``reaper``, which supervises this one, has ended."""
        if self.reaper in wait_for(self.descriptors):
            raise PeerClosed
        head_size, size = SIZES.unpack(self._receive(SIZES.size))
        return json.loads(self._receive(head_size)), self._receive(size)

    def send(self, message: Message, payload: bytes = b"") -> None:
        """Sends a message with a payload. Raises PeerClosed if the other end of the socket is closed."""
        try:
            self.control.sendall(encode(message, payload))
        except OSError as error:
            raise PeerClosed from error

    def _receive(self, size: int) -> bytes:
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


def wait_for(descriptors: Iterable[int], seconds: float | None = None) -> set[int]:
    """Waits until a file descriptor can be read or is closed by its peer. Returns all such descriptors.

    Returns an empty set if there is none within ``seconds``.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if seconds is None else seconds * 1000)}


def dumps(value: Any) -> bytes:
    """Returns ``value`` pickled: by cloudpickle if pickle fails or if ``value`` refers to this process's ``__main__``."""
    with contextlib.suppress(Exception):  # cloudpickle says why, if it fails as well
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        if b"__main__" not in data:
            return data
    import cloudpickle

    plain: bytes = cloudpickle.dumps(value)
    return plain


def encode(message: Message, payload: bytes) -> bytes:
    head = json.dumps(message).encode()
    return SIZES.pack(len(head), len(payload)) + head + payload


def decode(data: bytearray) -> tuple[Message, bytes]:
    """Returns message and payload from one complete result of :func:`encode`."""
    end = SIZES.size + SIZES.unpack_from(data)[0]
    return json.loads(data[SIZES.size : end]), bytes(memoryview(data)[end:])


if __name__ == "__main__":
    # The worker's files become a package, or ``import watch`` in a program might find our ``watch.py``.
    __path__ = [os.path.dirname(os.path.abspath(__file__))]
    sys.modules["rl_accel_worker"] = sys.modules["__main__"]
    importlib.import_module("rl_accel_worker.server").main(int(sys.argv[1]))
