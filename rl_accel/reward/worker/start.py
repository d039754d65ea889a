"""From the first message to the loop of a worker: who keeps it, what it imports, what it may see."""

import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from .channel import Channel, Gone, Header
from .isolate import (
    PR_SET_CHILD_SUBREAPER,
    Identity,
    leave_network,
    let_interpreter_be_read,
    prctl,
)
from .keeper import keep
from .leftovers import remove


def main(descriptor: int) -> None:
    """Split into a keeper and a worker, and serve until the other end of the socket is closed.

    The first message says what for: ``serves`` ("programs" or "grades"), ``folder`` (its own, made here), ``limited``, ``preload``
    (modules), ``path`` (``sys.path``), ``target``; its payload is the target's arguments, pickled. The answer: ``problem``, or "".
    """
    control = socket.socket(fileno=descriptor)
    channel = Channel(control)
    try:
        setup, payload = channel.next()
    except Gone:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        identity = Identity.take() if setup["limited"] else None
    except OSError as error:
        channel.send({"problem": str(error)})
        return
    above = os.getpid()
    worker = os.fork()
    if worker:
        keep(worker, control, setup["folder"], identity.uid if identity else None)
    os.setsid()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    keeper = os.pidfd_open(above)
    if os.getppid() == above:  # or it has died already
        _serve(Channel(control, keeper), setup, payload, identity)
    os._exit(0)


def _serve(channel: Channel, setup: Header, payload: bytes, identity: Identity | None) -> None:
    function, problem = None, ""
    try:
        function = _import(setup, payload)
    except BaseException as error:
        problem = _describe(error)
    network = setup["limited"] and leave_network()
    if identity and not problem:
        problem = let_interpreter_be_read()
    if setup["limited"]:
        os.mkdir(setup["folder"])
        os.chmod(setup["folder"], 0o711)
    from .serve import Server  # after the import: what it imports is then the target's, if that has changed sys.path

    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page
    try:
        channel.send({"problem": problem, "network": "none" if network else "shared"})
        if not problem:
            Server(channel, setup, identity, function).serve()
    except Gone:
        remove(setup["folder"])  # the keeper does that too, unless it is the one that has gone


def _import(setup: Header, payload: bytes) -> Callable[..., Any] | None:
    if "path" in setup:
        sys.path[:] = setup["path"]
    for module in setup["preload"]:
        importlib.import_module(module)
    if setup["serves"] == "programs":
        from . import usual  # noqa: F401 - what programs usually import

        return None
    from .grade import find

    return find(setup["target"], pickle.loads(payload) if payload else None)


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
