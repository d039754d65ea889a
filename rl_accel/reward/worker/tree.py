"""The processes below this one: who they are, what they use, and their end."""

import contextlib
import os
import resource
import signal
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MOST = 100_000
_TIMES, _RESIDENT, _STACK = slice(11, 15), 21, 25
"""Where the kernel's line says processor ticks (its own, and those of children waited for), pages, and the address of the stack."""


@dataclass(frozen=True)
class Usage:
    """What processes use at one moment.

    Attributes:
        cpu: processor seconds, of children that have ended and were waited for too.
        memory: resident bytes beyond those that forks have from this process; a page that two share counts twice.
        threads: how many there are, ended processes that nobody has waited for among them.
        waited: seconds that a thread was ready and had no processor, the largest of all threads; 0 where the kernel does not tell.
    """

    cpu: float
    memory: int
    threads: int
    waited: float


def descendants(spared: Collection[int] = ()) -> list[int]:
    """All processes below this one, but ``spared`` children of it. Orphans are its own children: it is their subreaper."""
    found: list[int] = []
    todo = [os.getpid()]
    while todo and len(found) < _MOST:
        for thread in threads(todo.pop()):
            with contextlib.suppress(OSError), open(f"{thread}/children") as file:
                children = [pid for word in file.read().split() if (pid := int(word)) not in spared]
                found += children
                todo += children
    return found


def threads(pid: int) -> list[str]:
    """The folders of the process's threads; empty if it is gone."""
    try:
        return [f"/proc/{pid}/task/{name}" for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def usage(processes: list[int]) -> Usage:
    """What ``processes`` use now."""
    cpu = memory = running = 0
    waited = 0.0
    ours = _stat(os.getpid())
    for pid in processes:
        with contextlib.suppress(OSError, IndexError, ValueError):
            stat = _stat(pid)
            cpu += sum(map(int, stat[_TIMES]))
            is_fork = stat[_STACK] == ours[_STACK] and int(stat[_STACK]) > 0  # else it runs a program of its own
            memory += max(0, int(stat[_RESIDENT]) - (int(ours[_RESIDENT]) if is_fork else 0))
        folders = threads(pid)
        running += len(folders)
        waited = max([waited, *(_waited(folder) for folder in folders)])
    return Usage(cpu / _TICKS, memory * _PAGE, running, waited)


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process, after its name, which may be anything."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()


def main_waited(pid: int) -> float:
    """Seconds that the process's main thread has waited for a processor; also of one that has ended and was not waited for."""
    return _waited(f"/proc/{pid}")


def _waited(folder: str) -> float:
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"{folder}/schedstat") as file:
        return int(file.read().split()[1]) / 1e9
    return 0.0


def kill_all(spared: Collection[int] = ()) -> None:
    """Kill every descendant and reap it. A process that is killed cannot fork any more, so a few rounds catch all."""
    pause = 0.0002
    while True:
        _reap()
        living = descendants(spared)
        if not living:
            return
        for one in (signal.SIGSTOP, signal.SIGKILL):
            for pid in living if one == signal.SIGSTOP else {*living, *descendants(spared)}:
                with contextlib.suppress(OSError):
                    os.kill(pid, one)
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def reap_orphans(child: int) -> None:
    """Wait for processes that have ended and whose parents have too. ``child``, which has not, is left alone."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != child:
            os.waitpid(ended.si_pid, 0)


def cpu_of_ended() -> float:
    """Processor seconds of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def own_processes() -> int:
    """Threads that this user has: a limit on processes counts them too."""
    return sum(len(threads(pid)) for pid in of_user(os.getuid()))


def of_user(uid: int) -> Iterator[int]:
    """All processes of a user that can be seen."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == uid:
                    yield int(name)
