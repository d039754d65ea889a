"""Finds the launch lines in a project's scripts. The scripts run in a shell whose programs only record their arguments."""

import contextlib
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

READERS = (
    "bash sh cat dirname basename date sed awk grep head tail wc realpath readlink env seq sort expr cut tr uname id uniq printf"
    " hostname"
)
"""Programs that run as usual, because they only read. A program that is named nowhere in this module does nothing."""
STARTERS = "python python3 ray torchrun accelerate uv nohup srun sbatch"
NOTE = """#!/bin/sh
case "$1" in
  -c) case "$*" in *npu*) exit 1;; esac; echo 8; exit 0;;
  -) exit 0;;
esac
{{ printf '%s\\0' "$0" "$@"; printf '\\0'; }} >> {record}
"""
"""Shell script that replaces each program in STARTERS: records its arguments and starts nothing. ``python -c`` prints 8."""
ANSWERS = {
    "nvidia-smi": "#!/bin/sh\nfor i in 0 1 2 3 4 5 6 7; do echo GPU $i; done\n",
    "pip": "#!/bin/sh\necho megatron-core 0 /h\n",
    "tee": "#!/bin/sh\nexec cat\n",
}
SHELL = {
    "BASH_FUNC_command_not_found_handle%%": "() { :; }",
    "BASH_FUNC_ulimit%%": "() { :; }",
    "BASH_FUNC_kill%%": "() { :; }",
    "BASH_FUNC_cd%%": '() { builtin cd "$@" 2>/dev/null || :; }',
    "BASH_FUNC_source%%": '() { [ ! -f "$1" ] || builtin source "$@"; }',
}
SECONDS = 20.0
"""Maximum seconds of a script. A script that takes longer is stopped; the lines that it has launched until then count."""


def launch_lines(
    root: Path, given: Mapping[str, str], *commands: Sequence[str], folders: Sequence[str] = ("",)
) -> Iterator[list[str]]:
    """Runs the shell scripts of a checkout, then ``commands``. Yields each command line with which they would start a trainer.

    A line that a script repeats is yielded once.

    Args:
        root: folder of the checkout.
        given: environment variables that the scripts expect their user to set.
        commands: further commands, such as Python that runs scripts in Python.
        folders: folders below ``root`` with the shell scripts.
    """
    with tempfile.TemporaryDirectory() as folder:
        programs = Path(folder, "bin")
        record = Path(folder, "record")
        work = Path(folder, "work")
        programs.mkdir()
        work.mkdir()
        for name in READERS.split():
            (programs / name).symlink_to(shutil.which(name) or "/bin/true")
        for name, text in {
            **dict.fromkeys(STARTERS.split(), NOTE.format(record=shlex.quote(str(record)))),
            **ANSWERS,
        }.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        for entry in root.iterdir():  # files that scripts write do not reach the checkout
            (work / entry.name).symlink_to(entry)
        env = {"HOME": folder, "TMPDIR": folder, **SHELL, **given, "PATH": str(programs)}
        scripts = sorted(script for name in folders for script in (root / name).rglob("*.sh"))
        for command in (*(["/bin/bash", script] for script in scripts), *commands):
            record.write_text("")
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    command, cwd=work, env=env, capture_output=True, stdin=subprocess.DEVNULL, timeout=SECONDS
                )
            calls = record.read_text(errors="replace").split("\0\0")
            lines = [tuple(word for word in call.split("\0") if word) for call in calls]
            yield from map(list, dict.fromkeys(filter(None, lines)))
