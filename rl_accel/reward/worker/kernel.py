"""Calls of the kernel that Python has no functions for."""

import ctypes
import os

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 1, 38, 36
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x8, 0x1000, 0x4000, 0x40000
_CAPABILITIES_V3 = 0x20080522
_LIBC = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process; one that the kernel does not know is left out."""
    _LIBC.prctl(option, value, 0, 0, 0)


def unshare(spaces: int) -> None:
    """Leave namespaces.

    Raises:
        OSError: not allowed, or not there.
    """
    if _LIBC.unshare(spaces):
        _fail("unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Mount something in this process's mount namespace.

    Raises:
        OSError: not allowed, or not there.
    """
    words = [word if word is None else os.fsencode(word) for word in (source, target, kind, options)]
    if _LIBC.mount(*words[:3], flags, words[3]):
        _fail(f"mount {target}")


def drop_capabilities() -> None:
    """Give up all rights beyond those of the user.

    Raises:
        OSError: not allowed.
    """
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
    if _LIBC.capset(header, (ctypes.c_uint32 * 6)()):
        _fail("capset")


def _fail(what: str) -> None:
    number = ctypes.get_errno()
    raise OSError(number, f"{what}: {os.strerror(number)}")
