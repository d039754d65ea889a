"""Loaded by verl into every process of an end-to-end test. Writes the result of ``rl_accel.status()`` again and again.

One file a process, ``$STATUS_PROBE_DIR/<pid>.json``, with the role that Ray shows in the process title.
"""

import json
import os
import threading
import time
from pathlib import Path

import rl_accel.runtime


def _report(folder: Path) -> None:
    import psutil

    target = folder / f"{os.getpid()}.json"
    while folder.exists():
        title = " ".join(psutil.Process().cmdline())
        result = {"title": title, "status": rl_accel.status().to_dict()}
        part = target.with_suffix(".part")
        part.write_text(json.dumps(result))
        part.replace(target)
        time.sleep(1.0)


if "STATUS_PROBE_DIR" in os.environ:
    threading.Thread(target=_report, args=(Path(os.environ["STATUS_PROBE_DIR"]),), daemon=True).start()
