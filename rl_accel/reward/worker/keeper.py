"""Long-lived processes for a trusted grader. One process serves call after call. A keeper supervises and replaces it.

The first process that imports a grader becomes the grader's template if forking this process is safe. All keepers are then forks of
the template, and grader processes are forks of their keeper, so that the import costs time and memory once. If the import leaves
threads, connections or processes behind, forking is not safe, and every process of the grader runs the import itself.
"""

import contextlib
import fcntl
import gc
import os
import random
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import NoReturn

from . import Channel, Message, PeerClosed, Start, WorkerRequest, decode, encode, wait_for
from .child import Grader, find_grader, grade, problem_of
from .isolation import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl
from .watch import Sink, Watch, cpu_of_ended, descendants, kill_all, seconds_waited

_DECAY = 0.9
"""Factor by which the sums of wall seconds and of busy seconds shrink at each new call, so that about the last ten calls decide
whether a grader mostly waits. Chosen by hand."""


@dataclass
class Keeper:
    """Supervises one process that calls the grader, and replaces this process if it was stopped or died.

    Attributes:
        start, arguments: first message to the worker, and its payload.
        grader: imported grader if this keeper is a fork of the template (the process that has imported the grader); else None.
    """

    channel: Channel
    start: Start
    arguments: bytes
    grader: Grader | None = None

    def serve(self) -> NoReturn:
        """Answers requests, one at a time, until the trainer process or the reaper (supervising process) has ended. Then exits."""
        may_be_template = self.grader is None
        try:
            while True:
                self._serve_with_one_process(may_be_template)
                self.start, may_be_template = replace(self.start, reseed=True), False
        except PeerClosed:
            with contextlib.suppress(BaseException):
                kill_all()
        finally:
            os._exit(0)

    def _serve_with_one_process(self, may_be_template: bool) -> None:
        """Starts a grader process and passes requests to it. Returns when it must be replaced: it was stopped, or died in a call.

        Raises PeerClosed if this keeper must end: the trainer process or the reaper (supervising process) has ended; the grader
        cannot be imported; or the grader process became the template, which is only forked, and has ended.
        """
        ours, theirs = socket.socketpair()
        child = os.fork()
        if child == 0:
            ours.close()
            self._run_grader_process(Channel(theirs), may_be_template)
        theirs.close()
        with ours:
            ready = self._wait_until_ready(ours, child)
            self.channel.send(ready)
            if ready.get("forks"):  # the process is a template, which reads the messages to the worker itself
                wait_for([os.pidfd_open(child), *self.channel.descriptors - {self.channel.control.fileno()}])
            elif not ready["problem"]:
                while True:
                    request, payload = self.channel.next()
                    if "limits" in request and not self._call(WorkerRequest(**request), payload, ours, child):
                        return
        raise PeerClosed

    def _wait_until_ready(self, process: socket.socket, child: int) -> Message:
        """Returns the first message of the new grader process, which says whether the grader could be imported.

        ``process`` is the socket to the grader process, ``child`` its pid.
        """
        report, ended = Sink(process.fileno()), os.pidfd_open(child)
        try:
            while not report.whole:
                found = wait_for([report.descriptor, ended, *self.channel.descriptors])
                if found & self.channel.descriptors:
                    self.channel.next()  # raises PeerClosed, or returns a message for an ended execution
                elif (not report.read() or ended in found) and not report.whole:  # a child of it may hold the pipe open
                    return {"problem": "the process of the grader ended while it was imported", "shared": []}
        finally:
            os.close(ended)
        return decode(report.data)[0]

    def _call(self, request: WorkerRequest, payload: bytes, process: socket.socket, child: int) -> bool:
        """Has the grader process (socket ``process``, pid ``child``) answer a request. Returns whether that process still lives."""
        report = Sink(process.fileno())
        # no limit on CPU seconds: a grader may compute on all cores
        watch = Watch({"wall": request.limits["wall"]}, self.channel, (), report)
        process.setblocking(True)
        with contextlib.suppress(OSError):  # the process has died, which the watch notices
            process.sendall(encode({}, payload))
        process.setblocking(False)
        stopped, status, seconds = watch.until_over(child)
        if status is None:
            head, body = decode(report.data)
            self.channel.send({**head, **seconds}, body)
            return True
        reason = f"{stopped} limit" if stopped else f"its process ended with {os.waitstatus_to_exitcode(status)}"
        verdict = "timeout" if stopped == "wall" else "killed"
        self.channel.send({"verdict": verdict, "reason": reason, **seconds, "renews": True})
        return False

    def _run_grader_process(self, calls: Channel, may_be_template: bool) -> NoReturn:
        """Body of the grader process: imports the grader if necessary, reports to its parent, the keeper, and serves calls.

        The keeper is the process that replaces a stopped grader process. With ``may_be_template``, a process that has imported the
        grader and can be forked safely serves no calls. It becomes the template: it forks keepers for further workers.
        """
        try:
            os.setsid()
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")  # out of memory, the kernel kills this process before the trainer process
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if not may_be_template:
                self.channel.control.close()
            if self.grader is None:
                connections = _connections()
                try:
                    self.grader = find_grader(self.start, self.arguments)
                except BaseException as error:
                    calls.send({"problem": problem_of(error), "shared": []})
                    os._exit(0)
                if may_be_template and _fork_is_safe(connections):
                    calls.send({"problem": "", "shared": [], "forks": True})
                    self._serve_forks(self.grader)
            if self.start.reseed:
                _reseed()
            else:
                random.setstate(self.grader.random_state)
            calls.send({"problem": "", "shared": []})
            serving = threading.Thread(target=_serve_calls, args=(calls, self.grader))
            if self.start.in_thread:
                serving.start()
                serving.join()
            else:
                serving.run()
        finally:
            os._exit(0)

    def _serve_forks(self, grader: Grader) -> None:
        """Loop of the template, the process that has imported the grader: forks a keeper for each socket that the trainer sends.

        A keeper supervises the grader process of one worker. Keepers that are forks need not import the grader again.
        """
        gc.collect()
        gc.freeze()  # garbage collection in a fork would copy every page
        start, control = self.start, self.channel.control
        while True:
            message, _ = self.channel.next()
            if "fork" not in message:
                continue
            _, (descriptor,), _, _ = socket.recv_fds(control, 1, 1)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if os.fork() == 0:
                control.close()
                prctl(PR_SET_CHILD_SUBREAPER, 1)
                Keeper(Channel(socket.socket(fileno=descriptor), self.channel.reaper), start, b"", grader).serve()
            os.close(descriptor)
            start = replace(start, reseed=True)


def _serve_calls(calls: Channel, grader: Grader) -> None:
    process, wall, busy = os.getpid(), 0.0, 0.0
    with contextlib.suppress(PeerClosed):
        while True:
            _, payload = calls.next()
            began, busy_before = time.monotonic(), _seconds_busy()
            head, body = grade(grader, payload, plain=False)
            wall = _DECAY * wall + time.monotonic() - began
            busy = _DECAY * busy + _seconds_busy() - busy_before
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            if os.getpid() != process:  # this process is a fork that the grader has made
                os._exit(0)
            calls.send({**head, "waits": busy < wall / 2}, body)


def _seconds_busy() -> float:
    """Returns the CPU seconds of this process and its ended children, plus the seconds that this thread waited for a processor."""
    return time.process_time() + cpu_of_ended() + seconds_waited("/proc/thread-self")


def _fork_is_safe(connections_before: set[str]) -> bool:
    """True if the import of the grader has left one thread, no child process, no new connection and no SIGCHLD handler."""
    if signal.getsignal(signal.SIGCHLD) != signal.SIG_DFL:  # a keeper would not learn how its processes end
        return False
    # The trial fork makes OpenBLAS, which numpy loads, end its threads, so that they are not counted. They restart later.
    if trial := os.fork():
        os.waitpid(trial, 0)
    else:
        os._exit(0)
    return len(os.listdir("/proc/self/task")) == 1 and not descendants() and _connections() <= connections_before


def _connections() -> set[str]:
    """Returns the open file descriptors that a fork must not share (all but files open for reading), as text "number target"."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            reads_only = fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            target = os.readlink(f"/proc/self/fd/{name}")
            if not (reads_only and target.startswith("/")):
                found.add(f"{name} {target}")
    return found


def _reseed() -> None:
    """Seeds random numbers anew, so that processes forked after the same import draw different ones."""
    random.seed()
    if numbers := sys.modules.get("numpy.random"):
        numbers.seed()
    if torch := sys.modules.get("torch"):
        torch.seed()
