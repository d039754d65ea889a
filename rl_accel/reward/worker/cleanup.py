"""Removes what programs leave in the file system, whatever they have done to it."""

import contextlib
import os
import shutil
import subprocess

COMMON = ("/tmp", "/var/tmp", "/dev/shm")
"""Folders where everybody may write."""


def remove(folder: str) -> None:
    """Remove a folder, also one that is closed, or nested deeper than Python can follow. One that is not there is no error."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        for command in (["chmod", "-R", "u+rwx", folder], ["rm", "-rf", folder]):
            with contextlib.suppress(OSError):
                subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class UserFiles:
    """Files that a user of our own has left in the common folders. A folder that has not changed is not read again."""

    def __init__(self, uid: int) -> None:
        self.uid = uid
        self._seen: dict[str, int] = {}

    def remove(self) -> None:
        for folder in COMMON:
            with contextlib.suppress(OSError):
                changed = os.stat(folder).st_mtime_ns
                if self._seen.get(folder) != changed:
                    self._remove_from(folder)
                    self._seen[folder] = changed  # as it was before: a change since then is looked at the next time

    def _remove_from(self, folder: str) -> None:
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid == self.uid:
                    if entry.is_dir(follow_symlinks=False):
                        remove(entry.path)
                    else:
                        os.unlink(entry.path)
