"""Start of a worker process, its reaper (the process that supervises and outlives it), and its request loop for untrusted code.

The request loop forks one process per request and sends one answer. For a trusted grader, ``keeper`` replaces it.
"""

import contextlib
import fcntl
import gc
import importlib
import json
import math
import os
import resource
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from typing import NoReturn

from . import Channel, PeerClosed, Start, WorkerRequest, isolation, wait_for
from .child import REPORT_BYTES, VALUE_BYTES, Grader, find_grader, grade, problem_of, run_program, verdict_of
from .keeper import Keeper
from .watch import Sink, Watch, descendants, kill_all, threads_of_user

END_SECONDS = 3.0
"""Seconds that a worker has to end itself after the trainer process has ended. Then the worker is killed."""
OUTPUT_KEPT = 10_000
"""Maximum number of characters of printed text in a result."""
PRELOAD = (
    "bisect collections copy datetime decimal fractions functools heapq importlib io itertools json math operator os random re"
    " shutil string sys tempfile time traceback typing"
)
"""Modules that programs usually import. The worker imports them once, before it forks a process for each program."""
_REPORT = 200
"""Lowest file descriptor for the pipe of a program's report. High, so that a program which closes low descriptors leaves it
open."""


def main(descriptor: int) -> None:
    """Runs a worker until the other end of the socket with this file descriptor is closed."""
    control = socket.socket(fileno=descriptor)
    channel = Channel(control)
    try:
        message, payload = channel.next()
    except PeerClosed:
        return
    start = Start(**message)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    identity, folder = None, ""
    try:
        if start.isolation == "process":
            identity = isolation.Identity.take()
        if start.isolation:
            folder = tempfile.mkdtemp(prefix="rl-accel-sandbox-", dir=start.folder)
            os.chmod(folder, 0o711)
    except OSError as error:
        return channel.send({"problem": str(error), "shared": []})
    if start.isolation == "bubblewrap":
        # This process is the first of its PID namespace: no process inside can kill it, and all of them end with it.
        Server(channel, start, folder).serve(payload)
        os._exit(0)
    isolation.prctl(isolation.PR_SET_CHILD_SUBREAPER, 1)
    unseen_threads = 0
    if start.isolation and isolation.pid_namespace_works():
        unseen_threads = threads_of_user()
        isolation.enter_pid_namespace()
    reaper = os.pidfd_open(os.getpid())
    worker = os.fork()
    if worker:
        _reap(worker, control, folder, identity)
    os.setsid()
    isolation.prctl(isolation.PR_SET_CHILD_SUBREAPER, 1)
    if os.getpid() == 1:
        isolation.mount_own_proc()
    channel = Channel(control, reaper)
    if start.isolation:
        Server(channel, start, folder, identity, unseen_threads).serve(payload)
    else:
        Keeper(channel, start, payload).serve()
    os._exit(0)


def _reap(worker: int, control: socket.socket, folder: str, identity: isolation.Identity | None) -> NoReturn:
    """Body of the reaper, the parent process of the worker: waits until the worker or the trainer process has ended.

    Then kills all remaining descendants and removes the temporary folder of the worker.
    """
    poll = select.poll()
    ended = os.pidfd_open(worker)
    poll.register(ended, select.POLLIN)
    poll.register(control, 0)  # reports that the socket was closed, but no messages
    with contextlib.suppress(OSError):
        poll.register(os.pidfd_open(os.getppid()), select.POLLIN)  # another process may hold the socket open
    if ended not in {descriptor for descriptor, _ in poll.poll()}:
        control.shutdown(socket.SHUT_RDWR)
        wait_for([ended], END_SECONDS)
    with contextlib.suppress(OSError):
        os.kill(worker, signal.SIGKILL)
    kill_all()
    isolation.remove(folder)
    if identity:
        identity.remove_files()
    os._exit(0)


@dataclass(frozen=True)
class Server:
    """Request loop of a worker for untrusted code.

    Attributes:
        folder: temporary folder of the worker.
        identity: user under which untrusted code runs; None: the user of the worker.
        unseen_threads: number of threads of the worker's user outside its PID namespace. They count towards the
            kernel's limit on this user's processes, too.
    """

    channel: Channel
    start: Start
    folder: str
    identity: isolation.Identity | None = None
    unseen_threads: int = 0

    def serve(self, payload: bytes) -> None:
        """Imports the grader or, to run programs, usual modules (PRELOAD).

        Reports success or the error, then answers requests one at a time.
        """
        grader, problem = None, ""
        try:
            if self.start.target:
                grader = find_grader(self.start, payload)
            else:
                for module in PRELOAD.split():
                    importlib.import_module(module)
        except BaseException as error:
            problem = problem_of(error)
        wrapped = self.start.isolation == "bubblewrap"
        apart = {
            "network": wrapped or isolation.leave_network(),
            "processes": os.getpid() == 1,
            "files": wrapped or self.identity is not None,
        }
        if self.identity and not problem:
            problem = isolation.let_interpreter_be_read()
        if not self.identity:
            isolation.prctl(isolation.PR_SET_DUMPABLE, 0)  # a program of the same user cannot attach to this process
        gc.collect()
        gc.freeze()  # garbage collection in a fork would copy every page
        spared = frozenset(descendants())  # processes started by the grader's import
        try:
            self.channel.send({"problem": problem, "shared": [name for name in apart if not apart[name]]})
            while not problem:
                message, payload = self.channel.next()
                if "limits" in message:  # else the message is for an execution that has ended
                    self._execute(WorkerRequest(**message), payload, grader, spared)
        except PeerClosed:
            isolation.remove(self.folder)  # the reaper removes the folder too, unless the reaper has ended

    def _execute(self, request: WorkerRequest, payload: bytes, grader: Grader | None, spared: Collection[int]) -> None:
        """Executes a request and sends the result once all processes of the execution have ended.

        ``spared``: pids of children of the worker that do not belong to the execution.
        """
        limits = request.limits
        with contextlib.ExitStack() as stack:
            folder = os.path.join(self.folder, "run")
            stack.callback(isolation.remove, folder)  # after the result is sent, because it may take long
            os.mkdir(folder, 0o700)
            if self.identity:
                stack.callback(self.identity.remove_files)
                os.chown(folder, self.identity.uid, self.identity.uid)
            report, to_report = os.pipe2(os.O_CLOEXEC)
            output, to_output = os.pipe2(os.O_CLOEXEC)
            for reading_end in (report, output):
                stack.callback(os.close, reading_end)
            stack.callback(kill_all, spared)  # before the pipes are closed and the folder is removed
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()  # or the fork would print the buffered text again
            said = Sink(report, REPORT_BYTES if grader is None else VALUE_BYTES)
            printed = Sink(output, limits["output_bytes"])
            watch = Watch(limits, self.channel, spared, said, printed)
            child = os.fork()
            if child == 0:
                self._run_child(request, payload, grader, folder, to_output, to_report)
            os.close(to_report)
            os.close(to_output)
            stopped, status, seconds = watch.until_over(child)
            text = printed.data.decode(errors="replace")
            verdict, reason, value = verdict_of(stopped, status or 0, bytes(said.data), text, request.case, grader)
            self.channel.send({"verdict": verdict, "reason": reason, "output": text[:OUTPUT_KEPT], **seconds}, value)

    def _run_child(
        self, request: WorkerRequest, payload: bytes, grader: Grader | None, folder: str, output: int, report: int
    ) -> NoReturn:
        """Body of the forked process: executes the request, writes the report, and exits without the program's cleanup handlers."""
        try:
            try:
                os.setsid()
                self.channel.control.close()
                with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                    file.write("1000")  # out of memory, the kernel kills this process before the trainer process
                report = self._confine(request, folder, output, report)
                # after the change of user, which resets this attribute
                isolation.prctl(isolation.PR_SET_PDEATHSIG, signal.SIGKILL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
            except BaseException as error:
                os.write(report, json.dumps({"verdict": "error", "reason": f"the sandbox failed: {error!r}"}).encode())
                os._exit(70)
            first_process = os.getpid()
            if grader is None:
                text = run_program(request.code, request.case)
            else:
                head, body = grade(grader, payload, plain=True)
                text = json.dumps(head).encode() + b"\n" + body
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(BaseException):
                    stream.flush()
            if os.getpid() == first_process:  # else this process is a fork that the program has made
                with contextlib.suppress(BaseException):
                    while text:
                        text = text[os.write(report, text) :]
            os._exit(0)
        finally:
            os._exit(71)

    def _confine(self, request: WorkerRequest, folder: str, output: int, report: int) -> int:
        """Prepares this forked process for untrusted code: sets working folder, input, output, environment, limits and user.

        Returns the new file descriptor of the pipe ``report``. Closes all other pipes and files.
        """
        os.chdir(folder)
        with open("stdin", "wb") as file:
            given = request.case["given"] if request.case.get("kind") == "stdin" else ""
            file.write(given.encode(errors="surrogateescape"))
        os.dup2(os.open("stdin", os.O_RDONLY), 0)
        os.unlink("stdin")
        os.dup2(output, 1)
        os.dup2(output, 2)
        report = fcntl.fcntl(report, fcntl.F_DUPFD_CLOEXEC, _REPORT)
        os.closerange(3, report)
        os.closerange(report + 1, 1 << 16)
        os.environ.clear()
        os.environ.update({"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"})
        tempfile.tempdir = None
        limits = request.limits
        with open("/proc/self/statm") as file:  # address space that this process has inherited from the worker
            inherited = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_AS, limits["memory"] + inherited)
        _limit(resource.RLIMIT_FSIZE, limits["file_bytes"])
        _limit(resource.RLIMIT_NOFILE, 256)
        _limit(resource.RLIMIT_CPU, math.ceil(limits["cpu"]) + 1)
        if self.identity:
            _limit(resource.RLIMIT_NPROC, limits["processes"])
            self.identity.become()
        else:
            _limit(resource.RLIMIT_NPROC, limits["processes"] + threads_of_user() + self.unseen_threads)
            isolation.drop_capabilities()  # the process has some if it is in a user namespace
            isolation.prctl(isolation.PR_SET_DUMPABLE, 1)  # the kernel's default; the worker itself has 0
        isolation.prctl(isolation.PR_SET_NO_NEW_PRIVS, 1)
        return report


def _limit(which: int, value: float) -> None:
    most = resource.getrlimit(which)[1]
    bounded = int(value) if most == resource.RLIM_INFINITY else min(int(value), most)
    resource.setrlimit(which, (bounded, bounded))
