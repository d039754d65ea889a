"""Watches an execution until it ends, answers or a limit stops it, and ends all processes below this one."""

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
WAITED_FACTOR = 10.0
"""Waiting for a processor does not count against the wall limit, but no execution lasts longer than the limit times this."""
LATE_SECONDS = 0.1
"""If a look comes later than this, the machine was busy or stood still: the delay does not count against the wall limit."""
ALIVE_SECONDS = 1.0
"""So often an execution that is beyond its wall limit, because it waited, tells the trainer that it is still watched."""
TELL_SECONDS = 0.1
"""After so long, and twice as long, and so on, an execution that lives on tells the trainer whether it waits."""

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MOST_PROCESSES = 100_000
_waits_before: dict[str, float] = {}
"""Seconds that threads had waited for a processor before the execution that is watched now, by the thread's folder in /proc."""
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

    @property
    def whole(self) -> bool:
        """Whether a message of two parts has come, as :func:`rl_accel.reward.worker.encode` makes them."""
        return len(self.data) >= SIZES.size and len(self.data) == SIZES.size + sum(SIZES.unpack_from(self.data))

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
        report, output: what it says and prints; None: what it prints is not looked at.
        lives_on: the first process does not end with the execution, but reports in a message.
    """

    limits: dict[str, float]
    channel: Channel
    spared: Collection[int]
    report: Sink
    output: Sink | None = None
    lives_on: bool = False
    _waited: dict[str, float] = field(default_factory=dict, init=False)
    """Seconds by thread."""
    _paused: float = field(default=0.0, init=False)
    """Seconds by which looks came late: this process had no processor either, or the machine stood still."""
    _cpu_before: float = field(default=0.0, init=False)
    _began: float = field(default_factory=time.monotonic, init=False)
    _looked: bool = field(default=False, init=False)
    _tell_at: float = field(default_factory=lambda: time.monotonic() + TELL_SECONDS, init=False)
    _alive_at: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        _waits_before.clear()
        self._cpu_before = cpu_of_ended()

    def _look_for_the_first_time(self) -> None:
        """Take what processes that live on have used before this execution, at its first look: most have ended by then."""
        self._looked = True
        living = descendants(self.spared)
        self._cpu_before = cpu_of_ended() + _cpu_of(living)
        _waits_before.update({thread: _seconds_waited(thread) for pid in living for thread in _threads(pid)})

    def _tell_whether_it_waits(self) -> None:
        """Tell the trainer whether the execution has waited, for others than a processor, for most of its time."""
        wall = time.monotonic() - self._began
        cpu = cpu_of_ended() + _cpu_of(descendants(self.spared)) - self._cpu_before
        self.channel.send({"alive": True, "waits": cpu + self._waited_of(wall, cpu) < wall / 2})
        self._tell_at = self._began + 2 * wall

    def until_over(self, child: int) -> tuple[str, int | None, dict[str, float]]:
        """Wait until ``child``, its first process, answers, ends or a limit stops it. Unless it has answered, end all that is left.

        Returns:
            The limit that stopped it, or ""; the status of ``child`` if it ended by itself, as ``os.waitpid`` gives it, None if it
            has answered; and the seconds ``wall`` and ``cpu`` of all its processes, and ``waited`` of ``wall`` in which it was
            ready and had no processor.

        Raises:
            Gone: nobody waits for it any more; nothing is ended then.
        """
        stopped, status = self._until_end(child)
        wall = time.monotonic() - self._began
        if status is None and not self._looked:
            return "", None, {"wall": wall, "cpu": 0.0, "waited": 0.0}
        if status is None:
            self._exceeded(child)  # looks at what it waited
            cpu = max(0.0, cpu_of_ended() + _cpu_of(descendants(self.spared)) - self._cpu_before)
            return "", None, {"wall": wall, "cpu": cpu, "waited": self._waited_of(wall, cpu)}
        kill_all(self.spared)
        cpu = max(0.0, cpu_of_ended() - self._cpu_before)
        if not stopped and os.WIFSIGNALED(status) and cpu > self.limits["cpu"]:
            stopped = "cpu"  # the kernel's own limit struck before this watch, which had no processor, could look
        for sink in self._sinks():
            sink.read()  # what is still in the pipe
        return stopped, status, {"wall": wall, "cpu": cpu, "waited": self._waited_of(wall, cpu)}

    def _sinks(self) -> list[Sink]:
        return [self.report] if self.output is None else [self.report, self.output]

    def _until_end(self, child: int) -> tuple[str, int | None]:
        """Wait; return the limit that it exceeded ("cancelled" on a message), or "" if it ended by itself, and then its status.

        None stands for the status of one that has answered and lives on.
        """
        sinks = {sink.descriptor: sink for sink in self._sinks()}
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
                if self.lives_on and self.report.whole:
                    return "", None
                if any(sink.full for sink in sinks.values()):
                    return "output", -1
                if ended in ready:
                    self._look_at_waits([f"/proc/{child}/task/{child}"])
                    return "", os.waitpid(child, 0)[1]
                late = time.monotonic() - look_at
                if late >= 0:
                    self._paused += late if late > LATE_SECONDS else 0.0
                    if self.lives_on and not self._looked:
                        self._look_for_the_first_time()
                    elif self.lives_on and time.monotonic() > self._tell_at:
                        self._tell_whether_it_waits()
                    elif exceeded := self._exceeded(child):
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
        return int(file.read().split()[1]) / 1e9 - _waits_before.get(folder, 0.0)
    return 0.0


def _cpu_of(processes: Collection[int]) -> float:
    """Processor seconds of living processes, with those of children that they have waited for."""
    ticks = 0
    for pid in processes:
        with contextlib.suppress(OSError, IndexError, ValueError):
            ticks += sum(map(int, _stat(pid)[_TIMES]))
    return ticks / _TICKS


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
