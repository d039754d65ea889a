"""``rl-accel run -- COMMAND…``: run a trainer, and run it again with other overrides when it asks for that.

A launch asks by a file: its path is in the environment variable :data:`NOTE_VAR`, and it holds ``{"step": …, "overrides": […]}``
when the launch has saved a checkpoint and ended. The exit code of such a launch is :data:`EXIT_CODE`, but the file decides.
"""

import contextlib
import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from rl_accel.processes import become_subreaper, end_descendants, shell_exit_code

EXIT_CODE = 75
"""Of a run that wants to be launched again (``EX_TEMPFAIL`` of sysexits.h)."""
NOTE_VAR = "RL_ACCEL_RESTART_FILE"

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (*_ENDS, signal.SIGUSR1, signal.SIGUSR2)
_ORPHANS_S = 5.0
_PR_SET_PDEATHSIG = 1


class Launches:
    """Launches of one command, one after the other, in a process that passes on the signals it gets.

    Args:
        command: the first launch.
        max_restarts: launches after it.
        pause_s: between launches, for a cluster to see that the last one has ended.
    """

    def __init__(self, command: Sequence[str], max_restarts: int = 6, pause_s: float = 5.0) -> None:
        self._command, self._max, self._pause = list(command), max_restarts, pause_s
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def run(self) -> int:
        """Return the exit code of the last launch, 128 + n if signal n ended it. Call it in the main thread."""
        become_subreaper()
        overrides: list[str] = []
        reached = -1
        with tempfile.TemporaryDirectory(prefix="rl-accel-run-") as folder, self._signals():
            for restarts in itertools.count():
                file = Path(folder) / f"restart-{restarts}.json"
                code = self._launch([*self._command, *overrides], file)
                note = _read(file)
                if note is None or self._stopped:
                    return code
                step, again = note["step"], " ".join(note["overrides"])
                if restarts >= self._max:
                    _say(
                        f"stopped after {restarts} restarts, the most allowed (--max-restarts); to go on, add: {again}"
                    )
                    return code
                if step <= reached:
                    _say(
                        f"stopped: step {step} asks for a restart again, no step was made since; to go on, add: {again}"
                    )
                    return code
                reached, overrides = step, _merged(overrides, note["overrides"])
                _say(f"restart {restarts + 1} of at most {self._max}, after step {step}, with: {again}")
                self._rest()
                if self._stopped:
                    return code
        raise AssertionError("unreachable")

    def _launch(self, command: list[str], file: Path) -> int:
        environment = {**os.environ, NOTE_VAR: str(file)}
        try:
            self._child = subprocess.Popen(
                command, env=environment, start_new_session=True, preexec_fn=_end_with(os.getpid())
            )
        except OSError as error:
            _say(f"cannot start {command[0]}: {error}")
            return 127
        if self._stopped:  # the signal came while there was no one to pass it on to
            self._pass_on(signal.SIGTERM)
        code = self._child.wait()
        ended = end_descendants(_ORPHANS_S)
        if ended:
            _say(f"ended what the launch left behind: {', '.join(sorted(ended))}")
        return shell_exit_code(code)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._take) for number in _PASSED_ON}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: int, _frame: Any) -> None:
        self._stopped = self._stopped or number in _ENDS
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        if self._child is not None and self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, number)

    def _rest(self) -> None:
        deadline = time.monotonic() + self._pause
        while not self._stopped and time.monotonic() < deadline:
            time.sleep(0.1)


@click.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--max-restarts", type=click.IntRange(0), default=6, show_default=True, help="Launches after the first.")
@click.option("--pause", type=click.FloatRange(0), default=5.0, show_default=True, help="Seconds between launches.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(max_restarts: int, pause: float, command: tuple[str, ...]) -> None:
    """Run a trainer, and again with other overrides when it asks for that (rl_accel.tp_replan.action=restart)."""
    raise SystemExit(Launches(command, max_restarts, pause).run())


def _merged(before: list[str], after: list[str]) -> list[str]:
    keys = {item.partition("=")[0] for item in after}
    return [item for item in before if item.partition("=")[0] not in keys] + after


def _read(file: Path) -> dict[str, Any] | None:
    """Return the note of a launch, None without one."""
    try:
        note = json.loads(file.read_text())
        return {"step": int(note["step"]), "overrides": [str(item) for item in note["overrides"]]}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _say(f"the launch left a note that cannot be read: {error}")
        return None


def _end_with(parent: int) -> Any:
    """Return what has a child end when this process is killed; Linux alone can do that."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return ask


def _say(text: str) -> None:
    click.echo(f"rl-accel run: {text}", err=True)
