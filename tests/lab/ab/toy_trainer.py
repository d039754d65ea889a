"""A small program that imitates a trainer: takes overrides, writes JSONL metrics, and starts children that ignore signals.

Run by the tests as a real process. Overrides are ``key=value``: steps, seed, pause (seconds a step), adv (seconds that
the advantage stage claims to take), part_at (step from which reward and gradient differ), fail_at, hang_at, log (a line
to print), silent (log no metrics), broken (end before a log is opened), stubborn (a detached child that ignores SIGTERM
and has no environment; with ``deaf`` the trainer ignores it too).
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_STUBBORN = """
import os, signal, sys, time
if os.fork(): os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(300)
"""


def metrics(step: int, seed: int, adv: float, part_at: int) -> dict[str, float]:
    wobble = 0.01 * ((step * 7 + seed) % 5)
    parted = 1e-3 if part_at and step >= part_at else 0.0
    data = {"timing_s/gen": 1.0 + wobble, "timing_s/adv": adv + wobble / 10, "timing_s/update_actor": 0.5}
    data |= {"timing_s/step": 1.6 + adv + wobble * 1.1, "response_length/mean": 20.0 + step}
    data |= {"critic/score/mean": 0.1 + 0.04 * step + seed + parted, "actor/grad_norm": 1.0 / step + parted}
    data |= {"actor/kl_loss": 0.0 if step == 1 else 0.01, "training/rollout_probs_diff_max": 1e-7}
    return data | {"perf/throughput": time.time()}


def main() -> None:
    given = dict(word.split("=", 1) for word in sys.argv[1:])
    steps, seed = int(given["steps"]), int(given.get("seed", 0))
    Path("pid").write_text(str(os.getpid()))
    print("ray tmpdir", os.environ["RAY_TMPDIR"], "address", os.environ.get("RAY_ADDRESS"), flush=True)
    print(given.get("log", "training"), flush=True)
    if "stubborn" in given:
        subprocess.Popen([sys.executable, "-c", _STUBBORN, "stubborn_pid"], env={}, start_new_session=True).wait()
        while not Path("stubborn_pid").exists() or not Path("stubborn_pid").read_text():
            time.sleep(0.01)
        if given["stubborn"] == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "broken" in given:
        sys.exit("an override that nobody knows")
    path = Path(os.environ["VERL_FILE_LOGGER_PATH"])
    with path.open("w", buffering=1) as file:
        for step in range(1, steps + 1):
            time.sleep(float(given.get("pause", 0)))
            if step == int(given.get("hang_at", 0)):
                time.sleep(300)
            if step == int(given.get("fail_at", 0)):
                raise SystemExit(f"the trainer gave up at step {step}")
            if "silent" not in given:
                data = metrics(step, seed, float(given.get("adv", 0.4)), int(given.get("part_at", 0)))
                file.write(json.dumps({"step": step, "data": data}) + "\n")


if __name__ == "__main__":
    main()
