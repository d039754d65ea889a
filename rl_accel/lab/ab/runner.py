"""Runs the training runs of an A/B one after the other as real processes, and stores their metrics."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from rl_accel.errors import RlAccelError
from rl_accel.files import write_atomically
from rl_accel.lab.ab import supervisor
from rl_accel.lab.ab.progress import ProgressView
from rl_accel.lab.ab.recipe import RunPlan
from rl_accel.processes import become_subreaper, descendants, end_all, heeded
from rl_accel.runtime import FLAG_VARIABLES
from rl_accel.telemetry.logs import read_log

GRACE_S = 15.0
"""Seconds that a trainer may take to stop before it is killed. Ray itself gives its processes up to ten."""
MODULES = "VERL_USE_EXTERNAL_MODULES"
"""Environment variable with the modules that verl imports when it starts, separated by commas."""
RAY_DID_NOT_START = "The current node timed out during startup"
"""Part of Ray's error message if a Ray node takes too long to start (https://github.com/ray-project/ray/issues/65983)."""
_STARTS = 3
_POLL_S = 0.2


@dataclass
class RunResult:
    """Result of one run, stored as ``run.json`` in the folder of the run."""

    arm: str
    seed: int
    steps_wanted: int
    command: list[str]
    env: dict[str, str | None]
    status: str = "running"
    """State of the run: running, done, failed, timeout or interrupted."""
    exit_code: int | None = None
    steps_done: int = 0
    seconds: float = 0.0
    """Wall-clock seconds from the start of the command until its last process has ended."""
    first_step_at: float | None = None
    """Seconds from the start of the command to the first logged training step; None if there was none."""
    started: str = ""
    load_average: float | None = None
    """One-minute load average of the machine at the start of the run."""
    message: str = ""
    label: str = ""
    """Name of the run if its seed is unknown."""

    @property
    def name(self) -> str:
        return self.label or f"{self.arm}-seed{self.seed}"

    def is_of(self, plan: RunPlan) -> bool:
        """Returns whether this result belongs to ``plan``: same command, environment and number of steps."""
        return (self.command, self.env, self.steps_wanted) == (list(plan.command), dict(plan.env), plan.steps)


@dataclass
class Stop:
    """Stop signals received so far. The first signal asks the current run to end. The second kills the run at once."""

    signals: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.signals)

    @property
    def now(self) -> bool:
        return len(self.signals) > 1

    @contextlib.contextmanager
    def listening(self) -> Iterator["Stop"]:
        """Records SIGINT, SIGTERM and SIGHUP during the ``with`` block, unless they are ignored. Works in the main thread only."""
        caught = heeded(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, lambda n, _: self.signals.append(n)) for number in caught}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def only_writer(plan: RunPlan) -> Iterator[None]:
    """Holds a lock on the folder of a run during the ``with`` block, because the start of a run deletes the folder's content.

    Raises:
        RlAccelError: another process holds the lock.
    """
    path = plan.directory.with_name(f".{plan.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            what = "another rl-accel ab is writing this run"
            raise RlAccelError(f"{plan.directory}: {what}; wait for it, or give another --out") from error
        yield
        path.unlink(missing_ok=True)


def run_all(plans: Sequence[RunPlan], watcher: ProgressView, stop: Stop, resume: bool = False) -> list[RunResult]:
    """Runs all plans one after the other, also after one has failed. Returns the results, in the order of the plans.

    After a stop signal, the remaining plans are skipped and have no result. With ``resume``, a run that was completed earlier with
    the same command is not repeated; its stored result is returned.
    """
    results = []
    for plan in plans:
        result = load_result(plan.directory) if resume else None
        status = "kept from an earlier call"
        if result is None or result.status != "done" or not result.is_of(plan):
            if stop:
                break
            watcher.started(plan)
            result = run_one(plan, watcher, stop)
            status = f"{result.status}, {result.message}"
        watcher.ended(plan, status, result.seconds, result.first_step_at)
        results.append(result)
    return results


def run_one(plan: RunPlan, watcher: ProgressView, stop: Stop) -> RunResult:
    """Runs one plan in ``plan.directory``, whose old content is deleted first.

    Writes train.log, metrics.jsonl and run.json into this folder, and copies Ray's logs into it if the run fails.
    """
    shutil.rmtree(plan.directory, ignore_errors=True)
    plan.directory.mkdir(parents=True)
    result = RunResult(plan.arm, plan.seed, plan.steps, list(plan.command), dict(plan.env))
    result.started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    result.load_average = os.getloadavg()[0]
    _save(plan, result)
    metrics = plan.directory / "metrics.jsonl"
    bytes_read = 0
    start = time.monotonic()

    def follow() -> bool:
        nonlocal bytes_read
        size = metrics.stat().st_size if metrics.exists() else 0
        steps = read_log(metrics) if size > bytes_read else {}
        bytes_read = size
        for step in [step for step in steps if step > result.steps_done]:  # step 0 is a validation before training
            result.steps_done = step
            result.first_step_at = result.first_step_at or time.monotonic() - start
            watcher.step(plan, step, steps[step])
        watcher.tick(plan)
        return plan.timeout_s is not None and time.monotonic() - start > plan.timeout_s

    # a run joins a running Ray cluster only if its plan sets RAY_ADDRESS
    env = {"RAY_ADDRESS": None, **plan.env, "VERL_FILE_LOGGER_PATH": str(metrics), "PYTHONUNBUFFERED": "1"}
    with ray_temp_dir() as ray_dir:
        env["RAY_TMPDIR"] = str(ray_dir)
        log = plan.directory / "train.log"
        outcome = supervised(plan.command, env, plan.directory, log, stop=stop, follow=follow, temp=ray_dir)
        result.seconds = time.monotonic() - start
        follow()
        result.exit_code = outcome.exit_code
        result.status, result.message = _verdict(outcome, result)
        if result.status == "failed":
            for logs in sorted(ray_dir.glob("**/session_2*/logs")):
                with contextlib.suppress(OSError, shutil.Error):
                    target = plan.directory / "ray_logs"
                    shutil.copytree(logs, target, symlinks=False, ignore_dangling_symlinks=True, dirs_exist_ok=True)
    _save(plan, result)
    return result


@dataclass
class CommandExit:
    exit_code: int
    reason: str
    """Reason for the end of the command: "ended" (by itself), "stopped" (by a signal to this process) or "timeout"."""


def supervised(
    command: Sequence[str],
    env: Mapping[str, str | None],
    cwd: Path,
    log: Path,
    stop: Stop,
    follow: Callable[[], bool],
    temp: Path | None = None,
) -> CommandExit:
    """Runs a command until it ends, the user stops rl-accel (``stop``), or ``follow()`` returns True, which means a timeout.

    Returns the exit code and why the command ended.

    ``follow`` is called a few times per second. When this function returns or raises, no process of the command is left. If the
    calling process is killed, the command's processes end soon, too, and the folder ``temp`` is removed for it. An exception gets
    the last lines of ``log``, the file for the command's output, as a note.

    A command whose Ray node takes too long to start is started again, at most twice.

    The command inherits this process's environment without rl-accel's flags. ``env`` replaces variables, or removes those with the
    value None. If both have the variable :data:`MODULES`, the two lists are joined.
    """
    # the flags would turn features on in the baseline too
    inherited = {name: value for name, value in os.environ.items() if name not in FLAG_VARIABLES}
    full = {name: value for name, value in {**inherited, **env}.items() if value is not None}
    if (own := os.environ.get(MODULES)) and (added := env.get(MODULES)):
        full[MODULES] = f"{own},{added}"
    if "RAY_TMPDIR" in full:
        full.setdefault("VLLM_RPC_BASE_PATH", full["RAY_TMPDIR"])  # vLLM leaves sockets behind in this folder
    words = [sys.executable, "-m", supervisor.__name__, str(GRACE_S), str(temp or ""), *command]
    become_subreaper()  # processes that a killed supervisor leaves become children of this process
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    for again in reversed(range(_STARTS)):
        with log.open("ab") as output:
            before = output.tell()
            process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=output, stderr=output, cwd=cwd, env=full, start_new_session=True
            )
            try:
                reason = _wait(process, stop, follow)
            except BaseException as error:
                error.add_note(f"the end of {log}:\n{last_lines(log)}")
                raise
            finally:
                if (process.returncode or 0) < 0:
                    end_all(lambda: [child for child in descendants() if child.pid not in others])
        if not (again and reason == "ended" and process.returncode and RAY_DID_NOT_START in _end_of_log(log, before)):
            break
        with log.open("a") as file:
            print("rl-accel ab: Ray took longer to start than it allows; the run is started again", file=file)
    return CommandExit(process.returncode, reason)


def _wait(process: "subprocess.Popen[bytes]", stop: Stop, follow: Callable[[], bool]) -> str:
    """Waits for the end of a supervised command, a signal or a timeout, then ends the command. Returns ``CommandExit.reason``."""
    assert process.stdin is not None
    try:
        while process.poll() is None:
            if stop:
                return "stopped"
            if follow():
                return "timeout"
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
        return "ended"
    finally:
        process.stdin.close()  # asks the supervisor to end the run
        deadline = time.monotonic() + GRACE_S + 20.0
        while process.poll() is None and not stop.now and time.monotonic() < deadline:
            time.sleep(0.05)
        if process.poll() is None:
            end_all(lambda: descendants(process.pid), grace_s=0.0 if stop.now else 2.0)
            process.kill()
            process.wait()


@contextlib.contextmanager
def ray_temp_dir() -> Iterator[Path]:
    """Creates a temporary folder for Ray, whose paths must be short, and removes the folder after the ``with`` block."""
    base = tempfile.gettempdir()  # paths of Ray's sockets may have at most 107 bytes
    if len(base) > 24 and os.access("/tmp", os.W_OK):
        base = "/tmp"
    with tempfile.TemporaryDirectory(prefix="rlab-", dir=base, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def load_result(directory: Path) -> RunResult | None:
    """Returns the result stored in a run's folder; None if ``run.json`` is missing or damaged."""
    try:
        stored = json.loads((directory / "run.json").read_text())
        known = {name: value for name, value in stored.items() if name in RunResult.__dataclass_fields__}
        return RunResult(**known)  # earlier versions of rl-accel wrote further keys
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def prepare(command: Sequence[str], env: Mapping[str, str | None], cwd: Path, log: Path, stop: Stop) -> None:
    """Runs the prepare command of a recipe. Raises RlAccelError with the end of the command's log if the command fails."""
    log.unlink(missing_ok=True)
    outcome = supervised(command, env, cwd, log, stop=stop, follow=lambda: False)
    if outcome.reason == "ended" and outcome.exit_code:
        raise RlAccelError(f"prepare failed with exit code {outcome.exit_code}; the end of {log}:\n{last_lines(log)}")


def last_lines(log: Path, count: int = 30) -> str:
    """Returns the last ``count`` lines of a log file, each cut to 400 characters."""
    return "\n".join(line[:400] for line in _end_of_log(log).splitlines()[-count:])


def _end_of_log(log: Path, start: int = 0) -> str:
    """Returns the text of a log file from byte ``start`` on, at most the last 200,000 bytes; "" if the file cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, log.stat().st_size - 200_000))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _verdict(outcome: CommandExit, result: RunResult) -> tuple[str, str]:
    """Returns ``RunResult.status`` and ``RunResult.message`` of a run that has ended."""
    if outcome.reason == "stopped":
        return "interrupted", f"stopped at step {result.steps_done}"
    if outcome.reason == "timeout":
        return "timeout", f"stopped after {result.seconds:.0f} s (timeout_s) at step {result.steps_done}"
    if outcome.exit_code:
        return "failed", f"exit code {outcome.exit_code} at step {result.steps_done}"
    if not result.steps_done:
        return "failed", "no training step in metrics.jsonl: trainer.logger must include file"
    if result.steps_done < result.steps_wanted:
        return "failed", f"ended by itself at step {result.steps_done} of {result.steps_wanted}"
    return "done", f"{result.steps_done} steps"


def _save(plan: RunPlan, result: RunResult) -> None:
    write_atomically(plan.directory / "run.json", json.dumps(asdict(result), indent=1))
