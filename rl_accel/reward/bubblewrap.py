"""The command that runs a worker where it sees the interpreter and the system's programs, and nothing else."""

import shutil
import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("worker")


def bubblewrap_problem() -> str:
    """Say why bubblewrap cannot be used here; "" if it can."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed"
    done = subprocess.run([*bubblewrap(), "true"], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr.strip()[:200]


def bubblewrap() -> list[str]:
    """The words before the command that is to be run. It has a private /tmp, and processes and a network of its own."""
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    shown = ["/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"]
    shown += [sys.base_prefix, sys.prefix, *packages, str(WORKER)]
    return [
        "bwrap",
        *("--dev", "/dev", "--proc", "/proc", "--tmpfs", "/dev/shm", "--tmpfs", "/tmp", "--tmpfs", "/var/tmp"),
        *(word for path in shown for word in ("--ro-bind-try", path, path)),  # last: an interpreter may lie below /tmp
        *("--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000"),
        *("--die-with-parent", "--new-session", "--"),
    ]
