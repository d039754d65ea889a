"""Watches an execution until it ends or a limit stops it, and ends all processes below this one."""

import contextlib
import math
import os
import resource
import select
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from . import Channel

LOOK_SECONDS = 0.02
WAITED_FACTOR = 10.0
"""Waiting for a processor does not count against the wall limit, but no execution lasts longer than the limit times this."""
LATE_SECONDS = 0.1
"""If a look comes later than this, the machine was busy or stood still: the delay does not count against the wall limit."""
ALIVE_SECONDS = 1.0
"""So often an execution that is beyond its wall limit, because it waited, tells the trainer that it is still watched."""

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MOST_PROCESSES = 100_000
_TIMES, _RESIDENT, _STACK = slice(11, 15), 21, 25
"""Where the kernel's line says processor ticks (its own, and those of children waited for), pages, and the address of the stack."""


class Sink:
    """What comes out of a pipe, as far as ``most`` bytes and one more."""

    def __init__(self, descriptor: int, most: float = math.inf) -> None:
        self.descriptor = descriptor
        self.data = bytearray()
        self._most = most
        os.set_blocking(descriptor, False)

    @property
    def full(self) -> bool:
        return len(self.data) > self._most

    def read(self) -> bool:
        """Take what is there now; False at the end."""
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
    """Processor seconds of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@dataclass
class Watch:
    """Watches one execution, which begins when this is made.

    Args:
        limits: "wall" and "cpu" seconds, and, where they hold, resident bytes ("memory") and threads ("processes"). Changed here.
        channel: any message stops the execution, save new limits.
        spared: children of this process that are not of the execution.
        report, output: what it says and prints.
    """

    limits: dict[str, float]
    channel: Channel
    spared: Collection[int]
    report: Sink
    output: Sink
    _waited: dict[str, float] = field(default_factory=dict, init=False)
    """Seconds by thread."""
    _paused: float = field(default=0.0, init=False)
    """Seconds by which looks came late: this process had no processor either, or the machine stood still."""
    _cpu_before: float = field(default_factory=cpu_of_ended, init=False)
    _began: float = field(default_factory=time.monotonic, init=False)
    _alive_at: float = field(default=0.0, init=False)

    def until_gone(self, child: int) -> tuple[str, int, dict[str, float]]:
        """Wait until ``child``, its first process, ends or a limit stops it, and end all that is left of it.

        Returns:
            The limit that stopped it, or "" if it ended by itself; its status then, as ``os.waitpid`` gives it; and the seconds
            ``wall`` and ``cpu`` of all its processes, and ``waited`` of ``wall`` in which it was ready and had no processor.

        Raises:
            Gone: nobody waits for it any more; nothing is ended then.
        """
        stopped, status = self._until_end(child)
        wall = time.monotonic() - self._began
        kill_all(self.spared)
        cpu = cpu_of_ended() - self._cpu_before
        if not stopped and os.WIFSIGNALED(status) and cpu > self.limits["cpu"]:
            stopped = "cpu"  # the kernel's own limit struck before this watch, which had no processor, could look
        for sink in (self.report, self.output):
            sink.read()  # what is still in the pipe
        return stopped, status, {"wall": wall, "cpu": cpu, "waited": self._waited_of(wall, cpu)}

    def _until_end(self, child: int) -> tuple[str, int]:
        """Wait; return the limit that it exceeded ("cancelled" on a message), or "" if it ended by itself, and then its status."""
        sinks = {sink.descriptor: sink for sink in (self.report, self.output)}
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
                    self.limits |= message
                for descriptor in ready & sinks.keys():
                    if not sinks[descriptor].read():
                        poll.unregister(descriptor)
                if self.output.full or self.report.full:
                    return "output", -1
                if ended in ready:
                    self._look_at_waits([f"/proc/{child}/task/{child}"])
                    return "", os.waitpid(child, 0)[1]
                late = time.monotonic() - look_at
                if late >= 0:
                    self._paused += late if late > LATE_SECONDS else 0.0
                    if exceeded := self._exceeded(child):
                        return exceeded, -1
                    look_at = time.monotonic() + LOOK_SECONDS
        finally:
            os.close(ended)

    def _exceeded(self, child: int) -> str:
        """The limit that is exceeded now, or ""."""
        _reap_orphans(child)
        used = {"cpu": cpu_of_ended() - self._cpu_before, "memory": 0, "processes": 0}
        own = _stat(os.getpid())
        for pid in descendants(self.spared):
            with contextlib.suppress(OSError, IndexError, ValueError):
                stat = _stat(pid)
                used["cpu"] += sum(map(int, stat[_TIMES])) / _TICKS
                is_fork = stat[_STACK] == own[_STACK] and int(stat[_STACK]) > 0  # else it runs a program of its own
                pages = int(stat[_RESIDENT]) - (int(own[_RESIDENT]) if is_fork else 0)
                used["memory"] += max(0, pages) * _PAGE  # a page that two share counts twice
            threads = _threads(pid)
            used["processes"] += len(threads)
            self._look_at_waits(threads)
        now = time.monotonic()
        wall = now - self._began
        counted = wall - self._waited_of(wall, used["cpu"])
        if counted > self.limits["wall"] or wall > self.limits["wall"] * WAITED_FACTOR:
            return "wall"
        if now > max(self._alive_at, self._began + self.limits["wall"]):
            self.channel.send({"alive": True})
            self._alive_at = now + ALIVE_SECONDS
        return next((name for name, amount in used.items() if amount > self.limits.get(name, amount)), "")

    def _look_at_waits(self, threads: Collection[str]) -> None:
        for thread in threads:
            self._waited[thread] = max(_seconds_waited(thread), self._waited.get(thread, 0.0))

    def _waited_of(self, wall: float, cpu: float) -> float:
        """Returns the seconds of ``wall`` in which the execution was ready to run and had no processor.

        The waits of all threads are added, because a grader and the program that it starts wait for a processor one after the
        other. Threads that wait at the same time would be counted twice, so the result is at most ``wall - cpu``.
        """
        return max(0.0, min(sum(self._waited.values()) + self._paused, wall - cpu))


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process, after its name, which may be anything."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()


def _threads(pid: int) -> list[str]:
    """The folders of the process's threads; empty if it is gone."""
    try:
        return [f"/proc/{pid}/task/{name}" for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _seconds_waited(folder: str) -> float:
    """Seconds that a thread, or a process's main one, was ready and had no processor; also of one that nobody has waited for."""
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"{folder}/schedstat") as file:
        return int(file.read().split()[1]) / 1e9
    return 0.0


def descendants(spared: Collection[int] = ()) -> list[int]:
    """All processes below this one, but ``spared`` children of it. Orphans are its own children: it is their subreaper."""
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
    """Kill every descendant and reap it. A process that is killed cannot fork any more, so a few rounds catch all."""
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
    """Threads that this user has, of processes that can be seen: the kernel's limit on processes counts them."""
    count = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(_threads(int(name)))
    return count


def _reap_orphans(child: int) -> None:
    """Wait for processes that have ended and whose parents have too. ``child``, which has not, is left alone."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != child:
            os.waitpid(ended.si_pid, 0)
