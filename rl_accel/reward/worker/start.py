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
from .cleanup import remove
from .identity import Identity
from .kernel import PR_SET_CHILD_SUBREAPER, prctl
from .namespaces import (
    hide_processes,
    leave_network,
    let_interpreter_be_read,
    processes_can_be_hidden,
    show_own_processes,
)
from .reaper import reap
from .serve import Server
from .tree import own_processes


def main(descriptor: int) -> None:
    """Split into a reaper and a worker, and serve until the other end of the socket is closed.

    The first message says what for: ``serves`` ("programs" or "grades"), ``folder`` (its own, made here), ``limited``, ``wrapped``
    (in bubblewrap), ``preload`` (modules), ``path`` (``sys.path``), ``target``; its payload is the target's arguments, pickled. The
    answer says ``problem``, or "", and what is ``shared`` with the trainer: its "network", its "processes", or nothing.
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
    hidden = setup["limited"] and not setup["wrapped"] and processes_can_be_hidden()
    outer = own_processes() if hidden and not identity else 0
    if hidden:
        hide_processes()
    reaper = os.pidfd_open(os.getpid())
    worker = os.fork()
    if worker:
        reap(worker, control, setup["folder"], identity.uid if identity else None)
    os.setsid()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    if hidden:
        show_own_processes()
    _serve(Channel(control, reaper), setup, payload, identity, outer, hidden or setup["wrapped"])
    os._exit(0)


def _serve(
    channel: Channel, setup: Header, payload: bytes, identity: Identity | None, outer: int, hidden: bool
) -> None:
    function, problem = None, ""
    try:
        function = _import(setup, payload)
    except BaseException as error:
        problem = _describe(error)
    alone = setup["wrapped"] or (setup["limited"] and leave_network())
    if identity and not problem:
        problem = let_interpreter_be_read()
    if setup["limited"]:
        os.mkdir(setup["folder"])
        os.chmod(setup["folder"], 0o711)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page
    try:
        shared = [name for name, own in (("network", alone), ("processes", hidden)) if not own]
        channel.send({"problem": problem, "shared": shared})
        if not problem:
            Server(channel, setup, identity, function, outer).serve()
    except Gone:
        remove(setup["folder"])  # the reaper does that too, unless it is the one that has gone


def _import(setup: Header, payload: bytes) -> Callable[..., Any] | None:
    if "path" in setup:
        sys.path[:] = setup["path"]
    for module in setup["preload"]:
        importlib.import_module(module)
    if setup["serves"] == "programs":
        from . import preload  # noqa: F401 - what programs usually import

        return None
    from .grade import find

    return find(setup["target"], pickle.loads(payload) if payload else None)


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
