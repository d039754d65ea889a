"""The life of a worker: its start, its loop of one order, one fork, one answer, and the reaper that outlives it."""

import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import NoReturn

from . import Answer, Channel, Gone, Order, Ready, Start
from .child import Child, Grader, find_grader
from .isolation import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    Identity,
    enter_pid_namespace,
    leave_network,
    let_interpreter_be_read,
    mount_own_proc,
    pid_namespace_works,
    prctl,
    remove,
)
from .watch import Sink, Watch, cpu_of_ended, descendants, kill_all, threads_of_user

END_SECONDS = 3.0
"""A worker whose trainer has gone ends its program and itself; one that does not in this time is killed."""
OUTPUT_KEPT = 10_000
VERDICT_BYTES = 1 << 16
"""A report of a program, which is a verdict and a few words. What a grader returns may be as large as its memory."""
PRELOAD = (
    "bisect collections copy datetime decimal fractions functools heapq importlib io itertools json math operator os random re"
    " shutil string sys tempfile time traceback typing"
)
"""What programs usually import, imported once so that they need not."""


def main(descriptor: int) -> None:
    """Serve what comes from the socket ``descriptor`` until its other end is closed."""
    control = socket.socket(fileno=descriptor)
    channel = Channel(control)
    try:
        message, payload = channel.next()
    except Gone:
        return
    start = Start(**message)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if start.isolation == "bubblewrap":
        # This is the first process of its PID namespace. So nothing in there can stop or kill it, and all there ends with it.
        _serve(channel, start, payload, None, 0, own_processes=True)
        os._exit(0)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        identity = Identity.take() if start.isolation else None
    except OSError as error:
        return channel.send(asdict(Ready(str(error))))
    own_processes = bool(start.isolation) and pid_namespace_works()
    unseen_threads = threads_of_user() if own_processes and not identity else 0
    if own_processes:
        enter_pid_namespace()
    reaper = os.pidfd_open(os.getpid())
    worker = os.fork()
    if worker:
        _reap(worker, control, start.folder, identity)
    os.setsid()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    if own_processes:
        mount_own_proc()
    _serve(Channel(control, reaper), start, payload, identity, unseen_threads, own_processes)
    os._exit(0)


def _reap(worker: int, control: socket.socket, folder: str, identity: Identity | None) -> NoReturn:
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
    if identity:
        identity.remove_files()
    os._exit(0)


def _serve(
    channel: Channel,
    start: Start,
    payload: bytes,
    identity: Identity | None,
    unseen_threads: int,
    own_processes: bool,
) -> None:
    grader, problem = None, ""
    try:
        grader = _import(start, payload)
    except BaseException as error:
        problem = _describe(error)
    wrapped = start.isolation == "bubblewrap"
    own_network = wrapped or (bool(start.isolation) and leave_network())
    if identity and not problem:
        problem = let_interpreter_be_read()
    if start.isolation:
        os.mkdir(start.folder)
        os.chmod(start.folder, 0o711)
        if not identity:
            prctl(PR_SET_DUMPABLE, 0)  # a program of the same user cannot attach to this process
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page
    own = {"network": own_network, "processes": own_processes, "files": wrapped or identity is not None}
    try:
        channel.send(asdict(Ready(problem, [name for name, apart in own.items() if not apart])))
        if not problem:
            Server(channel, start, identity, grader, unseen_threads).serve()
    except Gone:
        remove(start.folder)  # the reaper does that too, unless it is the one that has gone


def _import(start: Start, payload: bytes) -> Grader | None:
    if start.path is not None:
        sys.path[:] = start.path
    for module in start.preload if start.target else (*PRELOAD.split(), *start.preload):
        importlib.import_module(module)
    return find_grader(start.target, pickle.loads(payload) if payload else None) if start.target else None


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


@dataclass(frozen=True)
class Server:
    """Executes orders.

    Attributes:
        channel: where they come from.
        start: the first message.
        identity: the user that untrusted code runs as; None: this one.
        grader: None if programs are run.
        unseen_threads: threads that this user has outside of this PID namespace.
    """

    channel: Channel
    start: Start
    identity: Identity | None
    grader: Grader | None
    unseen_threads: int

    def serve(self) -> None:
        """Answer orders, one at a time.

        Raises:
            Gone: the channel is closed.
        """
        spared = frozenset(descendants())  # what the target started when it was imported
        while True:
            message, payload = self.channel.next()
            if "run" not in message:
                continue  # a wish to stop what has ended meanwhile
            self._execute(Order(**message), payload, spared)
            if self.identity:
                self.identity.remove_files()

    def _execute(self, order: Order, payload: bytes, spared: frozenset[int]) -> None:
        """Execute an order and answer it when its last process has gone. Its folder goes after that: it may hold much."""
        untrusted, limits = bool(self.start.isolation), order.limits
        before = cpu_of_ended()
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(self._folder()) if untrusted else None
            report, to_report = _pipe(stack)
            out, to_out = _pipe(stack) if untrusted else (None, None)
            stack.callback(kill_all, spared)  # before its pipes are closed and its folder is removed
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()  # or the fork would print it a second time
            began = time.monotonic()
            child = os.fork()
            if child == 0:
                Child(
                    order=order,
                    payload=payload,
                    grader=self.grader,
                    folder=folder,
                    out=to_out,
                    report=to_report,
                    identity=self.identity,
                    channel=self.channel,
                    unseen_threads=self.unseen_threads,
                ).run()
            for descriptor in (to_report, to_out):
                if descriptor is not None:
                    os.close(descriptor)
            most = VERDICT_BYTES if self.grader is None else int(limits["memory"]) if untrusted else None
            watched = limits if untrusted else {"wall": limits["wall"], "cpu": limits["cpu"]}
            sinks = Sink(report, most), Sink(out, int(limits["output_bytes"]))
            watch = Watch(child, began, watched, self.channel, spared, *sinks)
            stopped, status = watch.until_end()
            wall = time.monotonic() - began
            kill_all(spared)
            cpu = cpu_of_ended() - before
            if not stopped and os.WIFSIGNALED(status) and cpu > limits["cpu"]:
                stopped = "cpu"  # the kernel's own limit struck before this watch, which had no processor, could look
            watch.drain()
            printed = bytes(watch.output.data)
            is_compared = order.case.get("kind") == "stdin" and not stopped
            answer = Answer(
                stopped=stopped,
                status=status,
                wall=wall,
                cpu=cpu,
                waited=watch.waited(wall, cpu),
                output=printed[:OUTPUT_KEPT].decode(errors="replace"),
                printed=printed.decode(errors="replace") if is_compared else "",
            )
            self.channel.send(asdict(answer), bytes(watch.report.data))

    @contextlib.contextmanager
    def _folder(self) -> Iterator[str]:
        """An empty folder of the execution's own."""
        folder = os.path.join(self.start.folder, "run")
        os.mkdir(folder, 0o700)
        try:
            if self.identity:
                os.chown(folder, self.identity.uid, self.identity.uid)
            yield folder
        finally:
            remove(folder)


def _pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe whose reading end the stack closes; the writing end is ours and the fork's to close."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    stack.callback(os.close, reading)
    return reading, writing
