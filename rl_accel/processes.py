"""Ending every process that a command started, however far it detached itself.

A Ray node starts its daemons in sessions of their own, so a process group is not enough. A process that supervises a command makes
itself a *child subreaper*: on Linux, orphans below it become its children, so all that the command started are its descendants.
"""

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterable

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_UNKILLABLE_S = 10.0


def become_subreaper() -> None:
    """Make this process the new parent of its orphaned descendants, where the system can (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """Return all living descendants of this process and reap those of its own children that have ended."""
    return [process for process in psutil.Process().children(recursive=True) if not has_ended(process)]


def has_ended(process: psutil.Process) -> bool:
    """Whether ``process`` is gone or a zombie; a zombie that is our own child is reaped."""
    try:
        if process.status() != psutil.STATUS_ZOMBIE:
            return False
        if process.ppid() == os.getpid():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
        return True
    except psutil.NoSuchProcess:
        return True


def end_all(find: Callable[[], Iterable[psutil.Process]], grace_s: float) -> list[str]:
    """End the processes that ``find`` returns: terminate, wait up to ``grace_s`` seconds, then kill until ``find`` returns none.

    Returns:
        The names of the processes that had to be ended. Processes that survive SIGKILL (stuck in the kernel) are given up after 10
        seconds and named with a trailing ``(still alive)``.
    """
    alive = list(find())
    ended = [_name(process) for process in alive]
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    psutil.wait_procs(alive, timeout=grace_s)
    deadline = time.monotonic() + _UNKILLABLE_S
    while alive := list(find()):  # again: a dying process may have started another
        if time.monotonic() > deadline:
            return [*ended, *(f"{_name(process)} (still alive)" for process in alive)]
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=1.0)
    return ended


def end_descendants(leave_s: float, grace_s: float = 2.0) -> list[str]:
    """End what is left below this process after its command has ended; return the names of what had to be ended.

    Args:
        leave_s: seconds for daemons that shut down by themselves to do so before any is told to.
        grace_s: seconds between terminating and killing.
    """
    deadline = time.monotonic() + leave_s
    while descendants() and time.monotonic() < deadline:
        time.sleep(0.1)
    return end_all(descendants, grace_s)


def shell_exit_code(returncode: int) -> int:
    """Return the exit code a shell would report for ``Popen.returncode``: 128 + n if signal n ended the process."""
    return 128 - returncode if returncode < 0 else returncode


def _name(process: psutil.Process) -> str:
    try:
        return f"{process.name()}[{process.pid}]"
    except Exception:  # psutil raises several classes when a process goes away meanwhile
        return f"[{process.pid}]"
