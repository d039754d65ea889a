"""Ends every process that a command started, including processes that have detached themselves.

Killing the process group is not enough, because a Ray node starts its daemons in separate sessions. The supervising process becomes
a *child subreaper*: on Linux, its orphaned descendants become its children, so all processes of the command stay its descendants.
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
    """Makes this process the new parent of its orphaned descendants (Linux; elsewhere does nothing)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """Returns all living descendants of this process, and reaps its direct children that have ended."""
    return [process for process in psutil.Process().children(recursive=True) if not has_ended(process)]


def has_ended(process: psutil.Process) -> bool:
    """Returns whether ``process`` is gone or a zombie. Reaps a zombie that is a direct child of this process."""
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
    """Terminates the processes that ``find`` returns, waits up to ``grace_s`` seconds, then kills until ``find`` returns none.

    Returns:
        Names of the processes that had to be ended. Processes that survive SIGKILL for 10 seconds (stuck in the kernel) are given
        up and named with a trailing ``(still alive)``.
    """
    alive = list(find())
    ended = [_name(process) for process in alive]
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    psutil.wait_procs(alive, timeout=grace_s)
    deadline = time.monotonic() + _UNKILLABLE_S
    while alive := list(find()):  # call find again: a dying process may have started another
        if time.monotonic() > deadline:
            return [*ended, *(f"{_name(process)} (still alive)" for process in alive)]
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=1.0)
    return ended


def end_descendants(leave_s: float, grace_s: float = 2.0) -> list[str]:
    """Ends the remaining descendants of this process after its command has ended. Returns the names of these processes.

    Args:
        leave_s: seconds that daemons have to shut down by themselves before they are terminated.
        grace_s: seconds between terminating and killing.
    """
    deadline = time.monotonic() + leave_s
    while descendants() and time.monotonic() < deadline:
        time.sleep(0.1)
    return end_all(descendants, grace_s)


def shell_exit_code(returncode: int) -> int:
    """Returns the exit code that a shell would report for ``Popen.returncode``: 128 + n if signal n ended the process."""
    return 128 - returncode if returncode < 0 else returncode


def _name(process: psutil.Process) -> str:
    try:
        return f"{process.name()}[{process.pid}]"
    except Exception:  # psutil raises several classes when a process ends meanwhile
        return f"[{process.pid}]"
