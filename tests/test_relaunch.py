"""Tests ``rl-accel run`` on toy trainers: relaunches by the note, ends of loops, signals, and remaining processes."""

import json
import os
import signal
import subprocess
import sys

import pytest

from rl_accel.relaunch import NOTE_VAR

pytestmark = pytest.mark.slow

TOY = f"""
import json, os, sys, time
from pathlib import Path
here = Path(sys.argv[1])
launches = here / "launches"
with launches.open("a") as file:
    file.write(json.dumps(sys.argv[2:]) + "\\n")
number = len(launches.read_text().splitlines())
note = here / "checkpoints" / "note.json"
note.parent.mkdir(exist_ok=True)
note.unlink(missing_ok=True)
Path(os.environ["{NOTE_VAR}"]).write_text(str(note))
def ask(step, *overrides):
    note.write_text(json.dumps({{"step": step, "overrides": overrides, "reason": "preempted"}}))
"""


@pytest.fixture
def start(tmp_path, clean_environment):
    """``start(body)``: ``rl-accel run`` on a toy with this ``body``; ended after the test."""
    started = []

    def run(body, words=()):
        toy = tmp_path / "toy.py"
        toy.write_text(TOY + body)
        command = [sys.executable, "-m", "rl_accel", "run", "--"]
        command += [sys.executable, str(toy), str(tmp_path), *words]
        output = {"stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, cwd=tmp_path, env=clean_environment, start_new_session=True, **output)
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.wait(30)
        process.stderr.close()


def launches(folder):
    return [json.loads(line) for line in (folder / "launches").read_text().splitlines()]


@pytest.fixture
def noted(tmp_path, wait_for):
    """The file in which a toy writes down its process, once it has."""
    file = tmp_path / "pid"
    return lambda: wait_for(lambda: file.exists() and file.read_text() and file, "the toy")


@pytest.mark.parametrize(
    ("body", "code"),
    [("sys.exit(0)", 0), ("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)],
)
def test_without_a_note_the_code_of_the_command_is_returned_and_nothing_is_relaunched(start, tmp_path, body, code):
    assert start(body).wait(60) == code
    assert len(launches(tmp_path)) == 1


@pytest.mark.parametrize("code", [0, 1])
def test_the_note_decides_whatever_the_code_and_its_overrides_replace_earlier_ones(start, tmp_path, code):
    first = ["tp=1", "other=5"]
    process = start(
        f"""
if number == 1:
    ask(4, "tp=2", "mode=auto"); sys.exit({code})
if number == 2:
    ask(9, "tp=4", "mode=auto"); sys.exit({code})
sys.exit(3)
""",
        words=first,
    )
    assert process.wait(60) == 3
    assert launches(tmp_path) == [first, [*first, "tp=2", "mode=auto"], [*first, "tp=4", "mode=auto"]]
    said = process.stderr.read()
    assert "restart after step 4 (preempted), with: tp=2 mode=auto" in said
    assert "restart after step 9" in said


def test_a_launch_that_makes_no_step_is_the_last_and_a_line_says_how_to_go_on(start, tmp_path):
    process = start("ask(5, 'tp=2'); sys.exit(4)")
    assert process.wait(60) == 4
    assert len(launches(tmp_path)) == 2
    assert "stopped: no step was made since step 5; to go on, add: tp=2" in process.stderr.read()


def test_a_command_that_does_not_exist_is_127(clean_environment):
    command = [sys.executable, "-m", "rl_accel", "run", "--", "/no/such/command"]
    done = subprocess.run(command, env=clean_environment, capture_output=True, text=True)
    assert done.returncode == 127
    assert "cannot start /no/such/command" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_signal_reaches_the_command_and_one_that_ends_it_ends_the_relaunching(start, tmp_path, noted, number):
    process = start(
        f"""
import signal
def leave(number, frame):
    ask(3, "tp=2")
    sys.exit(21)
if number == 2:
    sys.exit(22)
signal.signal({number}, leave)
(here / "pid").write_text(str(os.getpid()))
time.sleep(120)
"""
    )
    noted()
    process.send_signal(number)
    assert process.wait(60) == (21 if number == signal.SIGTERM else 22)
    assert len(launches(tmp_path)) == (1 if number == signal.SIGTERM else 2), "who stops a run does not want it back"


def test_a_signal_that_nohup_ignores_ends_nothing(start, noted):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start(
            """
import signal
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(22))
(here / "pid").write_text(str(os.getpid()))
time.sleep(120)
"""
        )
    finally:
        signal.signal(signal.SIGHUP, before)
    noted()
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 22


def test_what_a_launch_leaves_behind_is_ended_before_the_next(start, tmp_path, gone):
    process = start(
        """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
(here / "left").write_text(str(child.pid))
"""
    )
    assert process.wait(60) == 0
    assert gone(tmp_path / "left")
    assert "ended what the launch left behind" in process.stderr.read()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a child of its parent's death")
def test_the_command_ends_when_the_relauncher_is_killed(start, noted, wait_for, gone):
    process = start('(here / "pid").write_text(str(os.getpid()))\ntime.sleep(120)')
    pid = noted()
    os.kill(process.pid, signal.SIGKILL)
    process.wait(30)
    wait_for(lambda: gone(pid), "the end of the command")
