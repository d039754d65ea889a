"""Restart notes: requests to launch a run again, sent from the trainer process to the driver process of a Ray job.

The trainer process may be on another node and cannot set the exit code of the driver process. It therefore stores a note in the Ray
cluster. When the main thread of the driver process has ended, the driver process writes the note to the file that ``rl-accel run``
asked for, and exits with :data:`rl_accel.relaunch.EXIT_CODE`.
"""

import atexit
import json
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

from rl_accel.files import write_atomically
from rl_accel.integrations.ray import propagate
from rl_accel.relaunch import EXIT_CODE, NOTE_VAR

_is_armed = False
_has_note = threading.Event()


def publish(note: dict[str, Any]) -> None:
    """Stores ``note``, a request to launch the run again, for the driver process of this Ray job. Replaces an earlier note.

    Keys of a note: see :mod:`rl_accel.relaunch`.
    """
    propagate.put("restart", json.dumps(note))


def arm() -> None:
    """Makes this driver process exit with :data:`EXIT_CODE` at the end of its main thread, if the trainer has asked for a restart.

    Does nothing in a second call or outside the main thread.
    """
    global _is_armed
    if _is_armed or threading.current_thread() is not threading.main_thread():
        return
    _is_armed = True
    # A thread reads the note, because Ray's exit function runs before _exit_with_code and disconnects from the store.
    threading.Thread(target=_look, name="rl-accel-restart-note", daemon=False).start()
    atexit.register(_exit_with_code)


def _look() -> None:
    threading.main_thread().join()
    try:
        note = propagate.get("restart") if propagate.is_connected() else None
    except Exception as error:  # without the cluster, there is no note
        print(f"rl-accel: no word of a restart could be had from Ray: {error}", file=sys.stderr)
        return
    if not note:
        return
    if file := os.environ.get(NOTE_VAR):
        write_atomically(Path(file), note)
    else:
        overrides = " ".join(json.loads(note)["overrides"])
        words = f"this run goes on when it is launched again with: {overrides} (rl-accel run -- does that)"
        print(f"rl-accel: {words}", file=sys.stderr)
    _has_note.set()


def _exit_with_code() -> None:
    """Ends this process with :data:`EXIT_CODE` if there is a note that asks for a restart, see :func:`publish`."""
    if not _has_note.is_set():
        return
    import ray

    ray.shutdown()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_CODE)  # a function that runs at exit cannot change the exit code in another way
