"""Tests that the supervisor leaves no process of a command behind, whichever process dies first."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rl_accel.lab.ab import supervisor
from rl_accel.lab.ab.runner import MODULES, RAY_DID_NOT_START, Stop, supervised

TRAINER = Path(__file__).with_name("toy_trainer.py")
CTRL_C = "import signal; raise SystemExit(signal.getsignal(signal.SIGINT) is not signal.default_int_handler)"


@pytest.fixture
def supervise(tmp_path):
    """Start the supervisor on a command in ``tmp_path``; ended after the test."""
    started = []
    environment = {**os.environ, "RAY_TMPDIR": "x", "VERL_FILE_LOGGER_PATH": str(tmp_path / "m")}

    def start(*command, grace=0.5):
        words = [sys.executable, "-m", supervisor.__name__, str(grace), "", *command]
        with (tmp_path / "log").open("wb") as log:
            streams = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log}
            process = subprocess.Popen(words, cwd=tmp_path, env=environment, start_new_session=True, **streams)
        started.append(process)
        return process

    yield start
    for process in started:
        process.stdin.close()
        process.wait()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise SystemExit(0)", 0),
        ("raise SystemExit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", 128 + 9),
        (None, 127),
        pytest.param(CTRL_C, 0, id="Ctrl-C reaches the command as if started by hand"),
    ],
)
def test_it_ends_with_the_exit_code_of_the_command(supervise, tmp_path, code, expected):
    command = (str(tmp_path / "absent"),) if code is None else (sys.executable, "-c", code)
    assert supervise(*command).wait(30) == expected
    assert ("cannot start" in (tmp_path / "log").read_text()) == (code is None)


def test_a_signal_that_nohup_ignores_stops_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop().listening() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.signals
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.signals == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_modules_that_verl_imports_are_added_to_those_of_the_shell(tmp_path, monkeypatch):
    monkeypatch.setenv(MODULES, "mine")
    code = f"import os; print(os.environ[{MODULES!r}], os.environ['OTHER'])"
    env = {MODULES: "of.the.recipe", "OTHER": "x"}
    supervised([sys.executable, "-c", code], env, tmp_path, tmp_path / "log", Stop(), lambda: False)
    assert "mine,of.the.recipe x" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("given", [{}, {"RL_ACCEL": "gae"}], ids=["none in the recipe", "in the recipe"])
def test_flags_of_the_shell_do_not_reach_a_run(tmp_path, monkeypatch, given):
    monkeypatch.setenv("RL_ACCEL", "sampler")
    monkeypatch.setenv("RL_ACCEL_CONFIG", "auto: true")
    monkeypatch.setenv("RL_ACCEL_SOURCES", "null")
    code = "import os; print({name: os.environ[name] for name in os.environ if name.startswith('RL_ACCEL')})"
    supervised([sys.executable, "-c", code], given, tmp_path, tmp_path / "log", Stop(), lambda: False)
    assert (tmp_path / "log").read_text().strip() == str(given)


def test_children_that_outlive_the_command_are_ended(supervise, tmp_path, gone):
    assert supervise(sys.executable, str(TRAINER), "steps=1", "stubborn=yes", grace=0.2).wait(30) == 0
    assert gone(tmp_path / "stubborn_pid")
    assert "ended what the run left behind: python" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_sigterm_ends_a_deaf_command_and_its_detached_child(supervise, tmp_path, wait_for, gone):
    process = supervise(sys.executable, str(TRAINER), "steps=1", "hang_at=1", "stubborn=deaf")
    wait_for((tmp_path / "m").exists, "the trainer's metrics file")
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGKILL
    assert gone(tmp_path / "pid")
    assert gone(tmp_path / "stubborn_pid")


@pytest.mark.slow
def test_a_command_whose_supervisor_was_killed_ends(supervise, tmp_path, wait_for, gone):
    process = supervise(sys.executable, str(TRAINER), "steps=1", "hang_at=1")
    wait_for((tmp_path / "m").exists, "the trainer's metrics file")
    process.kill()
    process.wait()
    wait_for(lambda: gone(tmp_path / "pid"), "the end of the command")


@pytest.mark.slow
def test_nothing_of_a_run_is_left_if_its_supervisor_is_killed(tmp_path, gone):
    """The trainer ignores SIGTERM, and a detached child of it too."""

    def kill_supervisor():
        if (tmp_path / "m").exists():
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.Error):  # it, or a child of an earlier test, is dead already
                    if supervisor.__name__ in child.cmdline():
                        child.kill()
        return False

    command = [sys.executable, str(TRAINER), "steps=1", "hang_at=1", "stubborn=deaf"]
    environment = {"RAY_TMPDIR": "x", "VERL_FILE_LOGGER_PATH": str(tmp_path / "m")}
    ended = supervised(command, environment, tmp_path, tmp_path / "log", Stop(), kill_supervisor)
    assert (ended.exit_code, ended.reason) == (-signal.SIGKILL, "ended")
    assert gone(tmp_path / "pid")
    assert gone(tmp_path / "stubborn_pid")


def test_what_ray_says_is_what_is_looked_for():
    assert RAY_DID_NOT_START in Path(pytest.importorskip("ray._private.node").__file__).read_text()


@pytest.mark.parametrize(
    ("says", "good", "starts"), [(RAY_DID_NOT_START, 9, 3), (RAY_DID_NOT_START, 2, 2), ("out of memory", 9, 1)]
)
def test_a_run_whose_ray_was_too_slow_to_start_is_started_again_twice_at_most(tmp_path, says, good, starts):
    code = f"file = open('starts', 'ab'); file.write(b'x'); raise SystemExit(file.tell() != {good} and {says!r})"
    outcome = supervised([sys.executable, "-c", code], {}, tmp_path, tmp_path / "log", Stop(), lambda: False)
    assert outcome.exit_code == (good != starts)
    assert (tmp_path / "starts").read_text() == "x" * starts
    assert (tmp_path / "log").read_text().count("the run is started again") == starts - 1
