"""The folder below which the workers of one process keep theirs."""

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path

from rl_accel.reward.worker.cleanup import remove

_PREFIX = "rl-accel-sandbox-"


class BaseFolder:
    """A folder in which other users can reach what they are told, and list nothing. It is locked for as long as its owner lives."""

    def __init__(self) -> None:
        parent = _temporary()
        _remove_abandoned(parent)
        while True:
            self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if os.path.exists(self.path):  # not found, unlocked yet, by somebody who removes abandoned ones
                break
            os.close(self._lock)
        os.chmod(self.path, 0o711)

    def remove(self) -> None:
        """Remove it with all in it."""
        if self._lock >= 0:
            remove(self.path)
            os.close(self._lock)
            self._lock = -1


def _temporary() -> str:
    """Where temporary files go; where this process is root, programs run as another user, who must be able to get there."""
    folder = Path(tempfile.gettempdir()).resolve()
    if os.geteuid() == 0 and not all(part.stat().st_mode & 0o001 for part in (folder, *folder.parents)):
        return "/tmp"
    return str(folder)


def _remove_abandoned(parent: str) -> None:
    """Remove the folders of processes that died without doing so. The kernel frees a lock when its last holder has died."""
    for entry in os.scandir(parent):
        with contextlib.suppress(OSError):
            if not entry.name.startswith(_PREFIX) or entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            found = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(entry.path)
            finally:
                os.close(found)
