"""Command ``client.py SOCKET WORDS...``, which runs ``python WORDS...`` in a fork of a running ``server.py``.

The fork gets the standard streams, working folder and environment of this command, which passes signals on to the fork, and ends
with its exit code. If the server cannot be reached, the command replaces itself by ``python WORDS...``. This module imports only
light modules, because every process of a run starts through it.
"""

import json
import os
import signal
import socket
import sys


def main(path: str, words: list[str]) -> int:
    """Runs ``python WORDS...`` in a fork of the server that listens at the socket ``path``, and returns the fork's exit code.

    Without a server, runs the program in this process.
    """
    request = json.dumps({"words": words, "cwd": os.getcwd(), "env": dict(os.environ)}).encode()
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        server.connect(path)
        socket.send_fds(server, [request], [0, 1, 2])
        pid = int(server.recv(64))
    except (OSError, ValueError):  # there is no server, or the request is too long for one packet
        os.execv(sys.executable, [sys.executable, *words])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: os.kill(pid, received))
    status = server.recv(64)
    code = os.waitstatus_to_exitcode(int(status)) if status else 1
    if code < 0:  # ends by the signal that ended the fork, as a process without a fork would
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
