"""Watches one execution until it ends, answers or exceeds a limit. Then kills what is left of it."""

import contextlib
import math
import os
import resource
import select
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from . import SIZES, Channel

LOOK_SECONDS = 0.02
"""Seconds between two checks of the limits. Chosen by hand."""
WAITED_FACTOR = 10.0
"""Multiple of the wall limit after which an execution is stopped, even if it has waited for a processor. The wall limit itself does
not count such waits."""
LATE_SECONDS = 0.1
"""Delay of a check above which the machine is taken to be busy. Such a delay does not count against the wall limit. Chosen by
hand."""
TELL_FIRST_SECONDS, TELL_SECONDS = 0.1, 1.0
"""The worker tells the trainer process that the execution still runs, and whether it mostly waits: first ``TELL_FIRST_SECONDS``
after the start, then at least every ``TELL_SECONDS``. Without these messages, the trainer process would take the worker for
dead."""

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MOST_PROCESSES = 100_000
_TIMES, _RESIDENT, _STACK = slice(11, 15), 21, 25
"""Indices into the result of :func:`_stat`: CPU ticks (with those of ended children), resident pages, address of the stack."""


class Sink:
    """Buffer for at most ``most`` bytes from a pipe. Also keeps the first byte beyond them, and then counts as full."""

    def __init__(self, descriptor: int, most: float = math.inf) -> None:
        self.descriptor = descriptor
        self.data = bytearray()
        self._most = most
        os.set_blocking(descriptor, False)

    @property
    def full(self) -> bool:
        return len(self.data) > self._most

    @property
    def whole(self) -> bool:
        """True if this buffer holds exactly one complete message, as made by :func:`rl_accel.reward.worker.encode`."""
        return len(self.data) >= SIZES.size and len(self.data) == SIZES.size + sum(SIZES.unpack_from(self.data))

    def read(self) -> bool:
        """Reads the bytes that the pipe holds now. Returns False once the pipe has ended or this buffer is full, else True."""
        while not self.full:
            try:
                received = os.read(self.descriptor, int(min(self._most + 1 - len(self.data), 1 << 20)))
            except BlockingIOError:
                return True
            if not received:
                return False
            self.data += received
        return False


def cpu_of_ended() -> float:
    """Returns the CPU seconds of all ended processes that this process has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@dataclass
class Watch:
    """Watches one execution (a program under test, or a call of a grader), which starts when this object is created.

    Args:
        limits: "wall" in seconds; optionally "cpu" in seconds, "memory" (resident bytes) and "processes" (number of threads).
        channel: socket from which messages come that stop the execution or set new limits.
        spared: pids of children of this process that do not belong to the execution.
        report: buffer for the result of the execution.
        output: buffer for the text that the execution prints. None for a grader whose process answers and continues to run.
    """

    limits: dict[str, float]
    channel: Channel
    spared: Collection[int]
    report: Sink
    output: Sink | None = None
    _began: float = field(default_factory=time.monotonic, init=False)
    _cpu_before: float = field(default_factory=cpu_of_ended, init=False)
    """CPU seconds that do not belong to this execution: those of earlier ones, and of the grader's process before this call."""
    _waited: dict[str, float] = field(default_factory=dict, init=False)
    """Seconds that each thread of the execution has waited for a processor, by the thread's folder in /proc."""
    _waited_before: float = field(default=0.0, init=False)
    """Seconds that the threads of a grader had waited for a processor before this call."""
    _paused: float = field(default=0.0, init=False)
    """Seconds by which checks of the limits came late, without delays of at most :data:`LATE_SECONDS`."""
    _looked: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._tell_at = self._began + TELL_FIRST_SECONDS
        self._lives_on = self.output is None
        self._sinks = [self.report] if self.output is None else [self.report, self.output]

    def until_over(self, child: int) -> tuple[str, int | None, dict[str, float]]:
        """Waits until the execution ends, answers or exceeds a limit. Then kills its processes, unless a grader has answered.

        Returns, for the execution whose first process has the pid ``child``:
            Name of the limit that stopped the execution ("cancelled" if a message did), or "".
            Status of ``child`` from ``os.waitpid``; -1 if the execution was stopped; None if ``child`` has answered.
            Seconds by name: ``wall``, ``cpu`` (of all processes) and ``waited`` (part of ``wall`` without a processor). The last
            two are 0 after an answer before the first check of the limits.

        Raises PeerClosed, and kills nothing, if the trainer process no longer waits for the result.
        """
        stopped, status = self._until_end(child)
        wall = time.monotonic() - self._began
        if status is not None:
            kill_all(self.spared)
            for sink in self._sinks:
                sink.read()  # the bytes that are still in the pipe
        elif not self._looked:
            return "", None, {"wall": wall, "cpu": 0.0, "waited": 0.0}
        cpu = self._use(child)["cpu"]
        if not (stopped or self._lives_on) and os.WIFSIGNALED(status or 0) and cpu > self.limits["cpu"]:
            stopped = "cpu"  # the kernel's limit acted first, because this process had no processor
        return stopped, status, {"wall": wall, "cpu": cpu, "waited": self._waited_of(wall, cpu)}

    def _until_end(self, child: int) -> tuple[str, int | None]:
        """Waits until the execution ends, answers or must be stopped. Returns ``(stopped, status)`` as :meth:`until_over` does."""
        sinks = {sink.descriptor: sink for sink in self._sinks}
        ended = os.pidfd_open(child)
        poll = select.poll()
        for descriptor in (*self.channel.descriptors, *sinks, ended):
            poll.register(descriptor, select.POLLIN)
        look_at = self._began + LOOK_SECONDS
        try:
            while True:
                pause = max(0.0, look_at - time.monotonic())
                ready = {descriptor for descriptor, _ in poll.poll(pause * 1000)}
                if ready & self.channel.descriptors:
                    message, _ = self.channel.next()
                    if "stop" in message:
                        return "cancelled", -1
                    self.limits |= {name: message[name] for name in message.keys() & self.limits.keys()}
                for descriptor in ready & sinks.keys():
                    if not sinks[descriptor].read():
                        poll.unregister(descriptor)
                if self._lives_on and self.report.whole:
                    return "", None
                if any(sink.full for sink in sinks.values()):
                    return "output", -1
                if ended in ready:
                    self._look_at_waits([f"/proc/{child}/task/{child}"])
                    return "", os.waitpid(child, 0)[1]
                late = time.monotonic() - look_at
                if late >= 0:
                    self._paused += late if late > LATE_SECONDS else 0.0
                    if self._lives_on and not self._looked:
                        # only now, because most calls end before the first check and avoid this cost
                        self._cpu_before += self._use(child)["cpu"]
                        self._waited_before = sum(self._waited.values())
                    elif exceeded := self._exceeded(child):
                        return exceeded, -1
                    self._looked = True
                    look_at = time.monotonic() + LOOK_SECONDS
        finally:
            os.close(ended)

    def _exceeded(self, child: int) -> str:
        """Returns the name of a limit that the execution exceeds now, or "".

        Also tells the trainer process that the execution still runs, if such a message is due.
        """
        used, now = self._use(child), time.monotonic()
        wall = now - self._began
        counted = wall - self._waited_of(wall, used["cpu"])
        if now > self._tell_at:
            self.channel.send({"alive": True, "waits": used["cpu"] + wall - counted < wall / 2})
            self._tell_at = now + min(wall, TELL_SECONDS)
        if counted > self.limits["wall"] or wall > self.limits["wall"] * WAITED_FACTOR:
            return "wall"
        return next((name for name, amount in used.items() if amount > self.limits.get(name, amount)), "")

    def _use(self, child: int) -> dict[str, float]:
        """Returns the CPU seconds, resident bytes and number of threads of the execution.

        Also updates the seconds that each thread has waited for a processor.
        """
        _reap_orphans(child)
        cpu, memory, count = cpu_of_ended() - self._cpu_before, 0, 0
        own = _stat(os.getpid())
        for pid in descendants(self.spared):
            with contextlib.suppress(OSError, IndexError, ValueError):
                stat = _stat(pid)
                cpu += sum(map(int, stat[_TIMES])) / _TICKS
                is_fork = stat[_STACK] == own[_STACK] and int(stat[_STACK]) > 0  # False after an exec
                pages = int(stat[_RESIDENT]) - (int(own[_RESIDENT]) if is_fork else 0)
                memory += max(0, pages) * _PAGE  # a page shared by two processes counts twice
            threads = _threads(pid)
            count += len(threads)
            self._look_at_waits(threads)
        return {"cpu": max(0.0, cpu), "memory": memory, "processes": count}

    def _look_at_waits(self, threads: Collection[str]) -> None:
        for thread in threads:
            self._waited[thread] = max(seconds_waited(thread), self._waited.get(thread, 0.0))

    def _waited_of(self, wall: float, cpu: float) -> float:
        """Returns the seconds of ``wall`` in which the execution was ready to run and had no processor; at most ``wall - cpu``."""
        # Threads may wait one after the other, such as a grader and the program that it starts. If they wait at the same time,
        # the sum is too large.
        waited = sum(self._waited.values()) - self._waited_before
        return max(0.0, min(waited + self._paused, wall - cpu))


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/<pid>/stat that follow the process name."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()


def _threads(pid: int) -> list[str]:
    """Returns the folders in /proc of all threads of a process; [] if it no longer exists."""
    try:
        return [f"/proc/{pid}/task/{name}" for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def seconds_waited(folder: str) -> float:
    """Returns the seconds that the thread with this ``folder`` in /proc has waited for a processor; 0 if unknown."""
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"{folder}/schedstat") as file:
        return int(file.read().split()[1]) / 1e9
    return 0.0


def descendants(spared: Collection[int] = ()) -> list[int]:
    """Returns the pids of all descendants of this process, also of those whose parents have ended.

    Leaves out the children in ``spared`` and their descendants.
    """
    below: list[int] = []
    parents = [os.getpid()]
    while parents and len(below) < _MOST_PROCESSES:
        for thread in _threads(parents.pop()):
            with contextlib.suppress(OSError), open(f"{thread}/children") as file:
                children = [pid for word in file.read().split() if (pid := int(word)) not in spared]
                below += children
                parents += children
    return below


def kill_all(spared: Collection[int] = ()) -> None:
    """Kills and reaps all :func:`descendants`."""
    # a killed process cannot fork any more, so a few repetitions suffice
    pause = 0.0002
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        living = descendants(spared)
        if not living:
            return
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in living if number == signal.SIGSTOP else {*living, *descendants(spared)}:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def threads_of_user() -> int:
    """Returns the number of this user's threads in all visible processes."""
    count = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(_threads(int(name)))
    return count


def _reap_orphans(child: int) -> None:
    """Reaps ended processes whose parents have ended too. Never reaps ``child``, whose exit status is read later."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != child:
            os.waitpid(ended.si_pid, 0)
