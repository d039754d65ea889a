"""A user for programs where the worker is root."""

import contextlib
import os
import pwd
import re
import socket

UIDS = range(60_600, 61_180)
"""Users that programs run as where the worker is root. Distributions and systemd leave these numbers to nobody."""
CLAIM = "\0rl-accel-sandbox-{}"
_CAPABILITIES = (0, 1, 5, 6, 7)  # chown, override permissions, kill, setgid, setuid


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
