"""Isolation of untrusted code: Linux namespaces, and if the worker is root a separate user, whose files are removed."""

import contextlib
import ctypes
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1 << 1, 1 << 2, 1 << 3, 1 << 12, 1 << 14, 1 << 18
_CAPABILITIES_V3 = 0x20080522
_LIBC = ctypes.CDLL(None, use_errno=True)

UIDS = range(60_600, 61_180)
"""User ids for untrusted code if the worker is root. Neither Linux distributions nor systemd assign these ids."""
_NEEDED_CAPABILITIES = (0, 1, 5, 6, 7)  # chown, override permissions, kill, setgid, setuid
_WRITABLE_BY_ALL = ("/tmp", "/var/tmp", "/dev/shm")


def prctl(option: int, value: int) -> None:
    """Sets an attribute of this process, if the kernel knows it."""
    _LIBC.prctl(option, value, 0, 0, 0)


def drop_capabilities() -> None:
    """Drops all capabilities of this process. Raises OSError if the kernel forbids it."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
    _check(_LIBC.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def pid_namespace_works() -> bool:
    """Returns whether :func:`enter_pid_namespace` and :func:`mount_own_proc` work on this machine. Tries them in a fork."""
    if trial := os.fork():
        return os.waitpid(trial, 0)[1] == 0
    with contextlib.suppress(BaseException):
        enter_pid_namespace()
        if inner := os.fork():
            os._exit(int(os.waitpid(inner, 0)[1] != 0))
        mount_own_proc()
        os._exit(0)
    os._exit(1)


def enter_pid_namespace() -> None:
    """Makes the next fork of this process the first process of a new PID namespace, whose processes all end with it.

    Raises OSError if the kernel forbids it.
    """
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        return _unshare(CLONE_NEWPID)
    _unshare(CLONE_NEWUSER | CLONE_NEWPID)  # without root; the user keeps its ids in the new user namespace
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def mount_own_proc() -> None:
    """Mounts a private /proc with the processes of this PID namespace only. Raises OSError if the kernel forbids it."""
    _own_mounts()
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def leave_network() -> bool:
    """Moves this process to an empty network namespace and a private IPC namespace. Returns False if the kernel forbids it."""
    with contextlib.suppress(OSError):
        _unshare(CLONE_NEWNET | CLONE_NEWIPC)
        return True
    return False


def let_interpreter_be_read() -> str:
    """Lets other users read the interpreter and the folders in ``sys.path``. Returns the reason why this failed, or "".

    If one of them lies in a folder that is closed to other users, such as /root, this process and its children see an open folder
    in its place, which contains only the interpreter and the folders in ``sys.path``.
    """
    roots = (sys.base_prefix, sys.prefix, *sys.path)
    interpreter = tuple(map(os.path.realpath, roots[:2]))
    closed: dict[str, list[str]] = {}
    for path in sorted({os.path.realpath(root) for root in roots if os.path.isdir(root)}):
        if path.startswith(interpreter) and os.stat(path).st_mode & 0o005 != 0o005:
            return f"untrusted code runs as another user, who cannot read {path}: `chmod -R o+rX {path}` lets it"
        for part in (*reversed(Path(path).parents), Path(path)):
            if not part.stat().st_mode & 0o001:
                closed.setdefault(str(part), []).append(path)
                break
    try:
        if closed:
            _own_mounts()
        for folder, paths in closed.items():
            _show_only(folder, paths)
    except OSError as error:
        below = ", ".join(closed)
        return f"untrusted code runs as another user, who cannot read the interpreter below {below} ({error})"
    return ""


def _show_only(folder: str, paths: list[str]) -> None:
    topmost = [path for path in paths if not any(path != other and path.startswith(f"{other}/") for other in paths)]
    sources = {path: os.open(path, os.O_PATH) for path in topmost}
    _mount("none", folder, "tmpfs", 0, "mode=0755")
    for path, source in sources.items():
        os.makedirs(path, exist_ok=True)
        _mount(f"/proc/self/fd/{source}", path, None, MS_BIND | MS_REC)
        os.close(source)


def _own_mounts() -> None:
    _unshare(CLONE_NEWNS)
    _mount("none", "/", None, MS_REC | MS_PRIVATE)


def _unshare(namespaces: int) -> None:
    _check(_LIBC.unshare(namespaces), "unshare")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [text if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    _check(_LIBC.mount(*encoded[:3], flags, encoded[3]), f"mount {target}")


def _check(result: int, call: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


@dataclass
class Identity:
    """User id for untrusted code that no other worker on this machine uses.

    Attributes:
        uid: the user id, also used as group id.
        claim: socket that reserves the user id: only one socket on the machine can have its name, which contains the id.
    """

    uid: int
    claim: socket.socket
    _cleaned: dict[str, int] = field(default_factory=dict, init=False)

    @classmethod
    def take(cls) -> "Identity | None":
        """Reserves and returns the first free user id; None if this process may not run code as another user.

        Raises OSError if all user ids in :data:`UIDS` are taken.
        """
        if not _may_change_user():
            return None
        for uid in UIDS:
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                claim.bind(f"\0rl-accel-sandbox-{uid}")
            except OSError:
                claim.close()
                continue
            try:
                pwd.getpwuid(uid)
            except KeyError:
                return cls(uid, claim)
        raise OSError(f"all users from {UIDS[0]} to {UIDS[-1]} are taken")

    def become(self) -> None:
        os.setgroups([])
        os.setresgid(self.uid, self.uid, self.uid)
        os.setresuid(self.uid, self.uid, self.uid)

    def remove_files(self) -> None:
        """Removes the files of the user ``uid`` from world-writable folders. Skips folders unchanged since the last call."""
        for folder in _WRITABLE_BY_ALL:
            with contextlib.suppress(OSError):
                changed = os.stat(folder).st_mtime_ns
                if self._cleaned.get(folder) != changed:
                    for entry in os.scandir(folder):
                        with contextlib.suppress(OSError):
                            if entry.stat(follow_symlinks=False).st_uid == self.uid:
                                is_folder = entry.is_dir(follow_symlinks=False)
                                (remove if is_folder else os.unlink)(entry.path)
                    self._cleaned[folder] = changed  # time before the scan, so that the next call sees later changes


def _may_change_user() -> bool:
    """True if this process is root and can become each user in ``UIDS``."""
    if os.geteuid() != 0:
        return False
    # in a container, root may lack capabilities or mapped user ids
    with open("/proc/self/status") as file:
        effective = re.search(r"^CapEff:\s*(\w+)", file.read(), re.MULTILINE)
    held = int(effective[1], 16) if effective else 0
    with open("/proc/self/uid_map") as file:
        mapped = [[int(word) for word in line.split()] for line in file]
    return all(held >> bit & 1 for bit in _NEEDED_CAPABILITIES) and any(
        first <= UIDS[0] and UIDS[-1] < first + count for first, _, count in mapped
    )


def remove(folder: str) -> None:
    """Removes ``folder``, even if it is missing, closed by its permissions, or nested too deeply for Python."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        for command in (["chmod", "-R", "u+rwx", folder], ["rm", "-rf", folder]):
            with contextlib.suppress(OSError):
                subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
