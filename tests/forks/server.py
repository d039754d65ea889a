"""Server that forks Python processes in which the libraries of a run are imported already.

A run of verl starts a dozen Python processes on one machine. Each imports torch, transformers and other libraries, which takes ten
seconds of processor time. ``server.py N`` imports these libraries once, and forks itself for each client (``client.py``) that
connects to the listening socket with file descriptor N.

verl, Ray and this project are not among the libraries, because they read the environment on import. Each fork imports them itself,
in half a second.

The server ends when its standard input closes. Only runs on a CPU use the server, because CUDA does not survive a fork. The fork
server of :mod:`multiprocessing` runs functions of its parent process; Ray needs a command.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from typing import Any

LIBRARIES = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "transformers.models.qwen2.modeling_qwen2",
    "tensordict",
    "datasets",
    "accelerate",
    "hydra",
    "peft",
    "numba",
    "aiohttp",
    "fastapi",
    "requests",
)


def main(listener: socket.socket) -> None:
    """Imports :data:`LIBRARIES`, then forks a process for each client until the standard input closes.

    Returns in each fork too, after the client's program has ended. If a library has started a thread, which makes forks unsafe,
    returns without forking; clients then start ordinary processes.
    """
    del sys.path[0]  # the folder of this script
    for library in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:  # a lock that another thread holds would stay locked in a fork
        print(f"processes start without a fork server, because it has {threads} threads", file=sys.stderr)
        return
    gc.freeze()  # garbage collection in a fork would copy every memory page
    atexit.register(gc.unfreeze)
    if (request := _serve(listener)) is not None:
        _run(request)


def _serve(listener: socket.socket) -> dict[str, Any] | None:
    """Forks this process for each client. Sends the client the fork's process ID, and its wait status when it has ended.

    Returns the client's request in each fork, and None in the server when its standard input closes.
    """
    # process ID and client of each fork, by the fork's pidfd, which is readable when the fork has ended
    forks: dict[int, tuple[int, socket.socket]] = {}
    while True:
        clients = [client for _, client in forks.values()]
        ready = select.select([sys.stdin, listener, *forks, *clients], [], [])[0]
        for pidfd in [pidfd for pidfd, (_, client) in forks.items() if pidfd in ready or client in ready]:
            pid, client = forks.pop(pidfd)
            if client in ready:  # it was killed
                os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
            with contextlib.suppress(OSError):
                client.send(str(status).encode())
            client.close()
            os.close(pidfd)
        if sys.stdin in ready:
            for pid, _ in forks.values():  # workers of Ray may outlive Ray's node by some seconds
                os.kill(pid, signal.SIGTERM)
            return None
        if listener not in ready:
            continue
        client, _ = listener.accept()
        data, streams, _, _ = socket.recv_fds(client, 1 << 20, 3)
        if data and not (pid := os.fork()):
            os.setpgid(0, 0)  # Ray kills the whole process group of a worker
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            for open_socket in (listener, client, *clients):
                open_socket.close()
            for number in (*forks, *streams):
                os.close(number)
            return dict(json.loads(data))
        for stream in streams:
            os.close(stream)
        if data:
            forks[os.pidfd_open(pid)] = pid, client
            with contextlib.suppress(OSError):
                client.send(str(pid).encode())


def _run(request: dict[str, Any]) -> None:
    """Runs the client's command ``python WORDS...`` in this fork, with the client's environment and working folder."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    import numpy as np
    import torch

    np.random.seed()  # without a new seed, all forks would draw the same numbers; `random` and torch reseed themselves
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # OpenMP has read the server's variable
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    words = request["words"]
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
