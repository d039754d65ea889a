"""Finding and ending every process of a run, however far it detached itself.

A Ray node starts its daemons in sessions of their own, so a process group is not enough. Two nets are used. The
supervisor of a run (:mod:`rl_accel.lab.ab.supervise`) is a *child subreaper*: on Linux, orphans of the run become its
children, so its descendants are the run. And every process of a run inherits the variable :data:`MARKER`, which finds
them even when the supervisor itself was killed.
"""

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from rl_accel.lab.ab.extra import needs

if TYPE_CHECKING:
    import psutil

MARKER = "RL_ACCEL_AB_RUN"
_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> bool:
    """Make this process the new parent of its orphaned descendants. False where the system cannot (not Linux)."""
    if not sys.platform.startswith("linux"):
        return False
    return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def descendants() -> "list[psutil.Process]":
    """Return all living descendants of this process and reap those of its own children that have ended."""
    psutil = needs("psutil")
    found = psutil.Process().children(recursive=True)
    return [process for process in found if not _ended(process)]


def marked(run_id: str) -> "list[psutil.Process]":
    """Return every living process of this user whose environment holds this run's marker, and their descendants."""
    psutil = needs("psutil")
    wanted, found = f"{MARKER}={run_id}".encode(), {}
    for process in psutil.process_iter():
        if process.pid == os.getpid() or not _has_marker(process.pid, wanted):
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            for member in (process, *process.children(recursive=True)):
                if member.pid != os.getpid():
                    found[member.pid] = member
    return [process for process in found.values() if not _ended(process)]


def end_all(find: "Callable[[], Iterable[psutil.Process]]", grace_s: float) -> list[str]:
    """End what ``find`` finds: terminate, wait up to ``grace_s``, then kill until nothing is found any more.

    Returns:
        The names of the processes that had to be ended. Processes that survive SIGKILL (stuck in the kernel) are given
        up after 10 seconds and named with a trailing ``(still alive)``.
    """
    psutil = needs("psutil")
    alive = list(find())
    ended = [_name(process) for process in alive]
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    psutil.wait_procs(alive, timeout=grace_s)
    deadline = time.monotonic() + 10.0
    while alive := list(find()):  # again: a dying process may have started another
        if time.monotonic() > deadline:
            return [*ended, *(f"{_name(process)} (still alive)" for process in alive)]
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=1.0)
    return ended


def _has_marker(pid: int, wanted: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return wanted in file.read().split(b"\0")
    except OSError:  # gone, or not ours
        return False


def _ended(process: "psutil.Process") -> bool:
    psutil = needs("psutil")
    try:
        if process.status() != psutil.STATUS_ZOMBIE:
            return False
        if process.ppid() == os.getpid():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
        return True
    except psutil.NoSuchProcess:
        return True


def _name(process: "psutil.Process") -> str:
    try:
        return f"{process.name()}[{process.pid}]"
    except Exception:  # psutil raises several classes when a process goes away meanwhile
        return f"[{process.pid}]"
