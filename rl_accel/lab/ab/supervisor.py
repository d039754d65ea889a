"""Supervisor of one command: ``python -m rl_accel.lab.ab.supervisor GRACE_S FOLDER COMMAND...``.

The supervisor ends all processes of the command when the command ends, or when SIGTERM or the end of its standard input asks the
supervisor to stop. The standard input is a pipe from :mod:`rl_accel.lab.ab.runner`, so that the command ends even if the runner is
killed. If the supervisor itself is killed, the command gets SIGTERM.
"""

import contextlib
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from rl_accel import processes
from rl_accel.lab.ab import fork_client, fork_server
from rl_accel.lab.verl_cpu import WORKER_PYTHON

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Environment variables that keep OpenMP and pyarrow's allocator from starting threads, which would make forks unsafe."""
_ORPHANS_S = 5.0
"""Maximum seconds for daemons that a trainer leaves, such as Ray's, to shut down by themselves. Chosen by hand."""


@contextlib.contextmanager
def forks(python: str, path: str, env: Mapping[str, str]) -> Iterator[list[str]]:
    """Runs a :mod:`fork_server` with the interpreter ``python`` during the ``with`` block. ``path``: path for the server's socket.

    Yields the words of a command that runs a program as ``python`` does, but in a fork of the server.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)  # clients wait while the server imports libraries
        server = subprocess.Popen(
            [python, fork_server.__file__, str(listener.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            env={**env, **_ONE_THREAD},
        )
    assert server.stdin is not None
    try:
        yield [python, "-S", "-E", fork_client.__file__, path]
    finally:
        server.stdin.close()
        server.wait()


@contextlib.contextmanager
def _fork_server(command: list[str], temp: str) -> Iterator[list[str]]:
    """Runs a :mod:`fork_server` during the ``with`` block, and yields a command that runs ``command`` as a fork of this server.

    The Ray workers that ``command`` starts become forks, too. Yields ``command`` unchanged, without a server, unless it runs Python
    on verl's CPU platform with a Ray cluster of its own. RL_ACCEL_FORK_SERVER=0 turns the server off.
    """
    name, *words = command
    python = os.path.abspath(shutil.which(name) or name)
    is_python = Path(name).name.startswith("python") and shutil.which(name)
    is_program = bool(words) and (words[0] == "-m" or not words[0].startswith("-"))
    is_on_cpu = os.environ.get("VERL_PLATFORM") == "cpu" and "RAY_ADDRESS" not in os.environ
    if not (is_python and is_program and is_on_cpu and temp) or os.environ.get("RL_ACCEL_FORK_SERVER") == "0":
        yield command
        return
    path = f"{temp}/forks-{os.getpid()}"  # if the run is started again in the same folder, the PID makes the path new
    with forks(python, path, os.environ) as start:
        os.environ[WORKER_PYTHON] = shlex.join(start)
        yield [*start, *words]


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
    with _fork_server(command, temp) as words:
        try:
            with_us = processes.end_with_parent(os.getpid())
            child = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=with_us)
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
