"""``rl-accel run -- COMMAND…``: runs a trainer command, and restarts the command with other overrides if the trainer asks for that.

A trainer that requests a restart saves a checkpoint, writes ``{"step": …, "overrides": […], "reason": …}`` to the file
:data:`NOTE` beside its checkpoints, and ends. The process that the command has started names this file with :func:`expect`.
"""

import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from rl_accel.processes import become_subreaper, end_descendants, end_with_parent, heeded, shell_exit_code

NOTE = "rl_accel_restart.json"
"""Name of the file with a request to restart, in the folder of the checkpoints."""
NOTE_VAR = "RL_ACCEL_RESTART_FILE"
"""Environment variable of a trainer command: path of the file to which :func:`expect` writes the path of the note."""
OVERRIDES_VAR = "RL_ACCEL_RESTART_OVERRIDES"
"""Environment variable of a restarted trainer: JSON list of the overrides that were appended to its command."""
PAUSE_SECONDS = 5.0
"""Seconds that processes of a launch have to end by themselves, and seconds until the next launch. Ray's processes
need one or two."""
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (*_ENDS, signal.SIGUSR1, signal.SIGUSR2)


def expect(note: Path) -> None:
    """Names the file of a possible request to restart, for ``rl-accel run``. Removes the file of an earlier launch."""
    note.unlink(missing_ok=True)
    if pointer := os.environ.get(NOTE_VAR):
        Path(pointer).write_text(str(note))


class Launches:
    """Launches of one trainer command. Forwards signals to the running launch, in the main thread of a process of its own."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self._command = command
        self._child: subprocess.Popen[bytes] | None = None
        self.is_stopped = False
        become_subreaper()
        for number in heeded(*_PASSED_ON):
            signal.signal(number, self._pass_on)

    def launch(self, overrides: list[str], pointer: Path) -> int:
        """Runs the command with ``overrides`` appended and ends all processes that it leaves behind. Returns the exit code.

        The exit code is 128 + n if signal n ended the launch. ``pointer`` is the value of :data:`NOTE_VAR`.
        """
        environment = {**os.environ, NOTE_VAR: str(pointer), OVERRIDES_VAR: json.dumps(overrides)}
        with_us = end_with_parent(os.getpid())
        try:
            self._child = subprocess.Popen(
                [*self._command, *overrides], env=environment, start_new_session=True, preexec_fn=with_us
            )
        except OSError as error:
            _say(f"cannot start {self._command[0]}: {error}")
            return 127
        if self.is_stopped:  # a signal to stop arrived before this child process had started
            self._child.terminate()
        code = self._child.wait()
        if ended := end_descendants(PAUSE_SECONDS):
            _say(f"ended what the launch left behind: {', '.join(sorted(ended))}")
        return shell_exit_code(code)

    def _pass_on(self, number: int, _frame: Any) -> None:
        self.is_stopped = self.is_stopped or number in _ENDS
        if self._child is not None:
            self._child.send_signal(number)  # has no effect on a child process that has ended


@click.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(command: tuple[str, ...]) -> None:
    """Runs a trainer, and restarts it with other overrides when the trainer asks for that (rl_accel.tp_replan.action=restart)."""
    launches = Launches(command)
    overrides: list[str] = []
    last_step = -1
    with tempfile.TemporaryDirectory(prefix="rl-accel-run-") as folder:
        pointer = Path(folder) / "note"
        while True:
            code = launches.launch(overrides, pointer)
            note_file = Path(pointer.read_text()) if pointer.exists() else pointer
            if launches.is_stopped or not note_file.exists():
                raise SystemExit(code)
            note = json.loads(note_file.read_text())
            overrides = note["overrides"]
            if note["step"] <= last_step:
                _say(f"stopped: no step was made since step {last_step}; to go on, add: {' '.join(overrides)}")
                raise SystemExit(code)
            last_step = note["step"]
            _say(f"restart after step {last_step} ({note['reason']}), with: {' '.join(overrides)}")
            time.sleep(PAUSE_SECONDS)
            if launches.is_stopped:
                raise SystemExit(code)


def _say(text: str) -> None:
    click.echo(f"rl-accel run: {text}", err=True)
