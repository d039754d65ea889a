"""``python -m rl_accel.lab.ab.supervise [options] -- COMMAND...``: run one command and leave nothing of it behind.

It ends the command and everything the command started when the command ends, when it gets SIGTERM, and when its
standard input closes. The last one is the point: the runner holds the other end, so even a killed runner takes its run
along. Exit code: the command's, or 128 + signal.
"""

import argparse
import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time

from rl_accel.lab.ab.processes import become_subreaper, descendants, end_all

_ORPHANS_S = 5.0


def main(arguments: list[str]) -> int:
    """Supervise the command given in ``arguments`` and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m rl_accel.lab.ab.supervise", description="Run one command.")
    parser.add_argument("--grace", type=float, default=15.0, help="seconds a stopped command may take to end")
    parser.add_argument("--temp", help="a folder that is removed if the command was stopped")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    code, stopped = _supervise(options.command, options.grace)
    if stopped and options.temp:
        shutil.rmtree(options.temp, ignore_errors=True)
    return code


def _supervise(command: list[str], grace_s: float) -> tuple[int, bool]:
    """Return the exit code and whether the command was stopped rather than ended by itself."""
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    for ignored in (signal.SIGINT, signal.SIGHUP):  # the runner decides, and it closes our input
        signal.signal(ignored, lambda number, _: None)  # SIG_IGN would be inherited by the command
    become_subreaper()
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr)
        return 127, False
    while child.poll() is None and not stopped:
        if select.select([sys.stdin], [], [], 0.1)[0] and not os.read(sys.stdin.fileno(), 1024):
            stopped.append(signal.SIGTERM)
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        try:
            child.wait(grace_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    else:
        _wait_for_orphans(min(grace_s, _ORPHANS_S))
    ended = end_all(descendants, grace_s=2.0)
    if ended:
        print(f"rl-accel ab: ended what the run left behind: {', '.join(sorted(ended))}", file=sys.stderr)
    code = child.wait()
    return (128 - code if code < 0 else code), bool(stopped)


def _wait_for_orphans(seconds: float) -> None:
    """Give daemons that shut down by themselves after the trainer's end the time to do so."""
    deadline = time.monotonic() + seconds
    while descendants() and time.monotonic() < deadline:
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
