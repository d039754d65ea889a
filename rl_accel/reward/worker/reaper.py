"""The process above a worker, which sees to it that nothing of the worker stays, however the worker or the trainer ends."""

import contextlib
import os
import select
import signal
import socket
from typing import NoReturn

from .cleanup import UserFiles, remove
from .tree import kill_all

END_SECONDS = 3.0
"""A worker whose trainer has gone ends its program and itself; one that does not in this time is killed."""


def reap(worker: int, control: socket.socket, folder: str, uid: int | None) -> NoReturn:
    """Wait until the worker ends or the trainer does, then end what is left of both and remove the worker's folder.

    The trainer's end shows in the socket, or, where another process of the trainer's holds that too, in the trainer itself.
    """
    poll = select.poll()
    ended = os.pidfd_open(worker)
    poll.register(ended, select.POLLIN)
    poll.register(control, 0)  # only that it was closed, not that a message came
    with contextlib.suppress(OSError):
        poll.register(os.pidfd_open(os.getppid()), select.POLLIN)
    if ended not in {descriptor for descriptor, _ in poll.poll()}:
        control.shutdown(socket.SHUT_RDWR)
        last = select.poll()
        last.register(ended, select.POLLIN)
        last.poll(END_SECONDS * 1000)
    with contextlib.suppress(OSError):
        os.kill(worker, signal.SIGKILL)
    kill_all()
    remove(folder)
    if uid is not None:
        UserFiles(uid).remove()
    os._exit(0)
