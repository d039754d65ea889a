"""Namespaces of a worker's own: processes and, later, the network, and mounts where programs need them."""

import contextlib
import os
import sys

from .kernel import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    mount,
    unshare,
)


def processes_can_be_hidden() -> bool:
    """Whether :func:`hide_processes` and :func:`show_own_processes` work here, tried in a fork."""
    trial = os.fork()
    if trial:
        return os.waitpid(trial, 0)[1] == 0
    status = 1
    with contextlib.suppress(BaseException):
        hide_processes()
        inner = os.fork()
        if inner == 0:
            with contextlib.suppress(BaseException):
                show_own_processes()
                status = 0
            os._exit(status)
        status = 0 if os.waitpid(inner, 0)[1] == 0 else 1
    os._exit(status)


def hide_processes() -> None:
    """Have the next fork be the first process of a space of its own: it sees no other, and when it ends, all in it are killed.

    An ordinary user needs a user namespace for that, in which it is itself.

    Raises:
        OSError: not allowed.
    """
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        return unshare(CLONE_NEWPID)
    unshare(CLONE_NEWUSER | CLONE_NEWPID)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def show_own_processes() -> None:
    """Have /proc tell of the processes of our space.

    Raises:
        OSError: not allowed.
    """
    _own_mounts()
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def leave_network() -> bool:
    """Move to a network of our own, which has no way out, and to shared memory and queues that go with us."""
    with contextlib.suppress(OSError):
        unshare(CLONE_NEWNET | CLONE_NEWIPC)
        return True
    return False


def let_interpreter_be_read() -> str:
    """Have another user be able to read the interpreter and ``sys.path``; say what stands in the way, or "".

    An interpreter below a closed folder (root's home, say) is shown in mounts of our own, where that folder holds nothing else.
    """
    needed = sorted(
        {os.path.realpath(path) for path in (sys.base_prefix, sys.prefix, *sys.path) if os.path.isdir(path)}
    )
    closed: dict[str, list[str]] = {}
    for path in needed:
        folder = "/"
        for part in path.strip("/").split("/"):
            folder = os.path.join(folder, part)
            if not os.stat(folder).st_mode & 0o001:
                closed.setdefault(folder, []).append(path)
                break
    if not closed:
        return ""
    try:
        _own_mounts()
        for folder, paths in closed.items():
            _show_only(folder, paths)
    except OSError as error:
        return (
            f"programs would run as another user, who cannot read the interpreter below {', '.join(closed)} ({error})"
        )
    return ""


def _show_only(folder: str, paths: list[str]) -> None:
    below = [path for path in paths if not any(path != other and path.startswith(f"{other}/") for other in paths)]
    sources = {path: os.open(path, os.O_PATH) for path in below}
    mount("none", folder, "tmpfs", 0, "mode=0755")
    for path, source in sources.items():
        os.makedirs(path, exist_ok=True)
        mount(f"/proc/self/fd/{source}", path, None, MS_BIND | MS_REC)
        os.close(source)


def _own_mounts() -> None:
    unshare(CLONE_NEWNS)
    mount("none", "/", None, MS_REC | MS_PRIVATE)
