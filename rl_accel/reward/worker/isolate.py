"""What a worker leaves behind before programs run in it: its user, its network, the processes and folders that others see."""

import contextlib
import ctypes
import os
import pwd
import re
import socket
import sys

UIDS = range(60_600, 61_180)
"""Users that programs run as where the worker is root. Distributions and systemd leave these numbers to nobody."""
CLAIM = "\0rl-accel-sandbox-{}"
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 1, 38, 36
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWNET = 0x00020000, 0x08000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
_CAPABILITIES = (0, 1, 5, 6, 7)  # chown, override permissions, kill, setgid, setuid
_LIBC = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    _LIBC.prctl(option, value, 0, 0, 0)


class Identity:
    """A user that no other worker on this machine runs programs as, for as long as this object lives in some process.

    Its number is that of an abstract socket, a name that only one can hold, and that is free again when its last holder has died.
    """

    def __init__(self, uid: int, claim: socket.socket) -> None:
        self.uid = uid
        self.claim = claim

    @classmethod
    def take(cls) -> "Identity | None":
        """The first that is free; None where this process may not change users."""
        if not _may_change_user():
            return None
        for uid in UIDS:
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                claim.bind(CLAIM.format(uid))
            except OSError:
                claim.close()
                continue
            if not _is_somebody(uid):
                return cls(uid, claim)
        raise OSError(f"all users from {UIDS[0]} to {UIDS[-1]} are taken")

    def become(self) -> None:
        os.setgroups([])
        os.setresgid(self.uid, self.uid, self.uid)
        os.setresuid(self.uid, self.uid, self.uid)


def _may_change_user() -> bool:
    """Root in a container may lack rights, and a user namespace the numbers."""
    if os.geteuid() != 0:
        return False
    with open("/proc/self/status") as file:
        found = re.search(r"^CapEff:\s*(\w+)", file.read(), re.MULTILINE)
    held = int(found[1], 16) if found else 0
    with open("/proc/self/uid_map") as file:
        mapped = [[int(word) for word in line.split()] for line in file]
    return all(held >> bit & 1 for bit in _CAPABILITIES) and any(
        first <= UIDS[0] and UIDS[-1] < first + count for first, _, count in mapped
    )


def _is_somebody(uid: int) -> bool:
    with contextlib.suppress(KeyError):
        pwd.getpwuid(uid)
        return True
    return False


def leave_network() -> bool:
    """Move to a network of our own, which has no way out, and to shared memory and queues that go with us."""
    return bool(_LIBC.unshare(CLONE_NEWNET | CLONE_NEWIPC) == 0)


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
    if _LIBC.unshare(CLONE_NEWNS) or _LIBC.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
        return f"programs would run as another user, who cannot read the interpreter below {', '.join(closed)}"
    for folder, paths in closed.items():
        below = [path for path in paths if not any(path != other and path.startswith(f"{other}/") for other in paths)]
        sources = {path: os.open(path, os.O_PATH) for path in below}
        _LIBC.mount(b"none", folder.encode(), b"tmpfs", 0, b"mode=0755")
        for path, source in sources.items():
            os.makedirs(path, exist_ok=True)
            if _LIBC.mount(f"/proc/self/fd/{source}".encode(), path.encode(), None, MS_BIND | MS_REC, None):
                return f"{path} could not be shown to the user that programs run as"
            os.close(source)
    return ""
