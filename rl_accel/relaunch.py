"""``rl-accel run -- COMMAND…``: runs a trainer command, and restarts the command with other overrides if the trainer asks for that.

A trainer requests a restart through the file whose path is in the environment variable :data:`NOTE_VAR`. The trainer saves a
checkpoint, writes ``{"step": …, "overrides": […], "reason": …}`` to that file and ends with exit code :data:`EXIT_CODE`. Only the
file counts.
"""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from rl_accel.console import finite
from rl_accel.processes import become_subreaper, end_descendants, end_with_parent, heeded, shell_exit_code

EXIT_CODE = 75
"""Exit code of a trainer that requests a restart (``EX_TEMPFAIL`` of sysexits.h)."""
NOTE_VAR = "RL_ACCEL_RESTART_FILE"
OVERRIDES_VAR = "RL_ACCEL_RESTART_OVERRIDES"
"""Environment variable of a restarted trainer: JSON list of the overrides that were appended to its command."""

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (*_ENDS, signal.SIGUSR1, signal.SIGUSR2)
_ORPHANS_S = 5.0


class Launches:
    """Runs a trainer, and runs it again (after ``pause_s`` seconds) if the trainer requests this. Forwards signals to it."""

    def __init__(self, command: Sequence[str], max_restarts: int, pause_s: float) -> None:
        self._command, self._max_restarts, self._pause_s = list(command), max_restarts, pause_s
        self._child: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def run(self) -> int:
        """Runs the command, and runs it again after each request for a restart. Returns the exit code of the last launch.

        The exit code is 128 + n if signal n ended the launch. Must run in the main thread of a process of its own, whose
        descendants it ends.
        """
        become_subreaper()
        for number in heeded(*_PASSED_ON):
            signal.signal(number, self._pass_on)
        overrides: list[str] = []
        restarts, reached = 0, -1
        with tempfile.TemporaryDirectory(prefix="rl-accel-run-") as folder:
            while True:
                file = Path(folder) / f"restart-{restarts}.json"
                code = self._launch(overrides, file)
                if not file.exists() or self._is_stopped:
                    return code
                note = json.loads(file.read_text())
                step, wanted, problem = note["step"], note["overrides"], ""
                if restarts >= self._max_restarts:
                    problem = f"stopped after {restarts} restarts, the most allowed (--max-restarts)"
                elif step <= reached:
                    problem = f"stopped: step {step} asks for a restart again, no step was made since"
                if problem:
                    _say(f"{problem}; to go on, add: {' '.join(wanted)}")
                    return code
                reached, overrides, restarts = step, wanted, restarts + 1
                which = f"restart {restarts} of at most {self._max_restarts}, after step {step} ({note['reason']})"
                _say(f"{which}, with: {' '.join(wanted)}")
                next_launch = time.monotonic() + self._pause_s
                while not self._is_stopped and time.monotonic() < next_launch:
                    time.sleep(0.1)
                if self._is_stopped:
                    return code

    def _launch(self, overrides: list[str], file: Path) -> int:
        command, with_us = [*self._command, *overrides], end_with_parent(os.getpid())
        environment = {**os.environ, NOTE_VAR: str(file), OVERRIDES_VAR: json.dumps(overrides)}
        try:
            self._child = subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=with_us)
        except OSError as error:
            _say(f"cannot start {command[0]}: {error}")
            return 127
        if self._is_stopped:  # a signal to stop arrived before this child process had started
            self._child.terminate()
        code = self._child.wait()
        if ended := end_descendants(_ORPHANS_S):
            _say(f"ended what the launch left behind: {', '.join(sorted(ended))}")
        return shell_exit_code(code)

    def _pass_on(self, number: int, _frame: Any) -> None:
        self._is_stopped = self._is_stopped or number in _ENDS
        if self._child is not None:
            self._child.send_signal(number)  # has no effect on a child process that has ended


@click.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--max-restarts", type=click.IntRange(0), default=6, show_default=True, help="Launches after the first.")
@click.option(
    "--pause",
    type=click.FloatRange(0),
    callback=finite,
    default=5.0,
    show_default=True,
    help="Seconds between launches.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(max_restarts: int, pause: float, command: tuple[str, ...]) -> None:
    """Runs a trainer, and restarts it with other overrides when the trainer asks for that (rl_accel.tp_replan.action=restart)."""
    raise SystemExit(Launches(command, max_restarts, pause).run())


def _say(text: str) -> None:
    click.echo(f"rl-accel run: {text}", err=True)
