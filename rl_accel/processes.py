"""Ends every process that a command started, including processes that have detached themselves.

Killing the command's process group is not enough, because a Ray node starts daemons in separate sessions. The supervising process
therefore becomes a *child subreaper*, the new parent of its orphaned descendants.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_UNKILLABLE_S = 10.0


def become_subreaper() -> None:
    """Makes the calling process the new parent of its orphaned descendants, so that :func:`descendants` finds them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def heeded(*signals: int) -> list[int]:
    """Returns those of ``signals`` that the calling process does not ignore. Under ``nohup``, a process ignores SIGHUP."""
    return [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]


def end_with_parent(parent: int) -> Callable[[], None]:
    """Returns a ``preexec_fn`` that ends a child process (SIGTERM) when its parent, the process with the ID ``parent``, ends."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return ask


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """Returns all living descendants of the process ``pid``, by default of the calling process. Reaps ended children."""
    return [process for process in psutil.Process(pid).children(recursive=True) if not has_ended(process)]


def has_ended(process: psutil.Process) -> bool:
    """Returns whether ``process`` is gone or a zombie. Reaps a zombie that is a child of the calling process."""
    try:
        if process.status() != psutil.STATUS_ZOMBIE:
            return False
        if process.ppid() == os.getpid():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
        return True
    except psutil.NoSuchProcess:
        return True


def end_all(find: Callable[[], Iterable[psutil.Process]], grace_s: float = 2.0) -> list[str]:
    """Sends SIGTERM to the processes that ``find`` returns, and SIGKILL to those that it returns ``grace_s`` seconds later.

    Returns the names of the processes that the first call of ``find`` returned. Processes that survive SIGKILL for 10 seconds are
    added with the suffix ``(still alive)``.
    """
    alive = list(find())
    ended = [_name(process) for process in alive]
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    psutil.wait_procs(alive, timeout=grace_s)
    deadline = time.monotonic() + _UNKILLABLE_S
    while alive := list(find()):  # find is called again because a dying process may have started another process
        if time.monotonic() > deadline:
            return [*ended, *(f"{_name(process)} (still alive)" for process in alive)]
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=1.0)
    return ended


def end_descendants(leave_s: float) -> list[str]:
    """Waits up to ``leave_s`` seconds for all descendants of this process to end. Then ends the rest and returns their names."""
    deadline = time.monotonic() + leave_s
    while descendants() and time.monotonic() < deadline:
        time.sleep(0.1)
    return end_all(descendants)


def shell_exit_code(returncode: int) -> int:
    """Returns the exit code that a shell would report for a ``Popen.returncode``: 128 + n if signal n ended the process."""
    return 128 - returncode if returncode < 0 else returncode


def _name(process: psutil.Process) -> str:
    try:
        return f"{process.name()}[{process.pid}]"
    except Exception:  # psutil raises several classes when a process ends meanwhile
        return f"[{process.pid}]"
