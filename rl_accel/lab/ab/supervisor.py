"""Supervisor of one command: ``python -m rl_accel.lab.ab.supervisor GRACE_S FOLDER COMMAND...``.

The supervisor ends all processes of the command when the command ends, or when SIGTERM or the end of its standard input asks the
supervisor to stop. The standard input is a pipe from :mod:`rl_accel.lab.ab.runner`, so that the command ends even if the runner is
killed. If the supervisor itself is killed, the command gets SIGTERM.
"""

import os
import select
import shutil
import signal
import subprocess
import sys

from rl_accel import processes

_ORPHANS_S = 5.0
"""Maximum seconds for daemons that a trainer leaves, such as Ray's, to shut down by themselves. Ray's take about two."""


def supervise(grace_s: float, temp: str, command: list[str]) -> int:
    """Runs a command, then ends all processes that the command has left.

    SIGTERM to this process, or the end of this process's standard input, stops the command. Returns the command's exit code, or
    128 + n if signal n ended the command.

    Args:
        grace_s: seconds between SIGTERM and SIGKILL for a stopped command.
        temp: folder that is removed if the command was stopped; "" for none.
    """
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    # Not for the supervisor: the runner handles SIGINT and SIGHUP, then closes this stdin; SGLang ends its servers by SIGQUIT.
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(ignored, lambda number, _: None)  # not SIG_IGN, which the command would inherit
    processes.become_subreaper()
    try:
        with_us = processes.end_with_parent(os.getpid())
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=with_us)
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr)
        return 127
    while child.poll() is None and not stopped:
        if select.select([sys.stdin], [], [], 0.1)[0] and not os.read(sys.stdin.fileno(), 1024):
            stopped.append(signal.SIGTERM)
    in_time = child.poll() is not None
    if not in_time:
        child.terminate()
        try:
            child.wait(grace_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    if in_time:
        ended = processes.end_descendants(leave_s=min(grace_s, _ORPHANS_S))
    else:
        ended = processes.end_all(processes.descendants)
    if ended:
        print(f"rl-accel ab: ended what the run left behind: {', '.join(sorted(ended))}", file=sys.stderr)
    if stopped and temp:
        shutil.rmtree(temp, ignore_errors=True)
    return processes.shell_exit_code(child.wait())


if __name__ == "__main__":
    sys.exit(supervise(float(sys.argv[1]), sys.argv[2], sys.argv[3:]))
