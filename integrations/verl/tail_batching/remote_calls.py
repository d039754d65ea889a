"""Functions that the trainer process has other processes call. They import nothing of verl, so that a call begins at once."""

from typing import Any

import psutil


def engine_has_failed(server: Any) -> bool:
    """Returns True if the engine of a living server is dead. Called in the server's process.

    vLLM's engine then has the flag ``errored``. With SGLang, a child process of the server has ended.
    """
    # SGLang then sends SIGQUIT to the server, but the server of a run in the background of a script ignores this signal.
    pids = getattr(getattr(server, "scheduler_info", None), "all_child_pids", ())
    return bool(getattr(getattr(server, "engine", None), "errored", False)) or any(map(_has_ended, pids))


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def forget_server(worker: Any) -> None:
    """Clears a training worker's handle of a dead server. The worker then looks up the restarted server by name."""
    for part in worker.worker_dict.values():
        if getattr(getattr(part, "rollout", None), "server_handle", None) is not None:
            part.rollout.server_handle = None
