"""Messages between the trainer and a worker: a line of JSON, and as many raw bytes after it as its ``bytes`` says."""

import contextlib
import json
import select
import socket
from typing import Any

Header = dict[str, Any]


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
        """Have ``poll`` wake for what comes from the trainer, and when the reaper ends."""
        poll.register(self.control, select.POLLIN)
        if self.reaper >= 0:
            poll.register(self.reaper, select.POLLIN)

    def close(self) -> None:
        self.control.close()

    def next(self) -> tuple[Header, bytes]:
        """Wait for a message.

        Raises:
            Gone: there will be none.
        """
        while b"\n" not in self._rest:
            self._receive()
        line, _, rest = self._rest.partition(b"\n")
        header: Header = json.loads(line)
        self._rest = rest
        size = header.get("bytes", 0)
        while len(self._rest) < size:
            self._receive()
        payload = bytes(self._rest[:size])
        del self._rest[:size]
        return header, payload

    def send(self, header: Header, payload: bytes = b"") -> None:
        if payload:
            header = {**header, "bytes": len(payload)}
        try:
            self.control.sendall(json.dumps(header).encode() + b"\n")
            self.control.sendall(payload)
        except OSError as error:
            raise Gone from error

    def interrupted(self, ready: set[int]) -> bool:
        """Whether a message came, which during an execution means that it is to stop; ``ready``: what poll has found.

        Raises:
            Gone: nobody waits for the execution any more.
        """
        if self.reaper in ready:
            raise Gone
        if not self._rest and self.control.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                got = self.control.recv(1 << 16, socket.MSG_DONTWAIT)
                if not got:
                    raise Gone
                self._rest += got
        return bool(self._rest)

    def _receive(self) -> None:
        ready = {descriptor for descriptor, _ in self._poll.poll()}
        if self.reaper in ready:
            raise Gone
        try:
            got = self.control.recv(1 << 20)
        except OSError as error:
            raise Gone from error
        if not got:
            raise Gone
        self._rest += got
