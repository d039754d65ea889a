"""Recipes that run ``toy_trainer.py`` as a real process, and the command line in a process of its own."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from click.testing import CliRunner

from rl_accel.errors import RecipeError
from rl_accel.lab.ab.cli import ab

TRAINER = Path(__file__).with_name("toy_trainer.py")


TOY = {
    "name": "toy",
    "description": "A toy that counts. The reward rises by 0.04 a step.",
    "command": ["python", str(TRAINER)],
    "arms": {"stock": {"overrides": ["adv=0.4"]}, "accelerated": {"overrides": ["adv=0.1"]}},
    "baseline": "stock",
    "steps": 8,
    "steps_overrides": ["steps=${steps}"],
    "seed_overrides": ["seed=${seed}"],
}


@pytest.fixture
def recipe_file(tmp_path: Path) -> Callable[..., Path]:
    """Write a toy recipe with top-level keys changed and return its path."""

    def write(**changes: Any) -> Path:
        folder = tmp_path / "recipe"
        folder.mkdir(exist_ok=True)
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(TOY | changes, sort_keys=False))
        return path

    return write


@pytest.fixture
def start_ab(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start ``ab`` in a process; whatever it started is killed after the test."""
    started: list[subprocess.Popen[str]] = []
    temp = tmp_path / "t"
    temp.mkdir()

    def start(*arguments: object) -> "subprocess.Popen[str]":
        words = [sys.executable, "-m", "rl_accel", "ab", *map(str, arguments)]
        env = {**os.environ, "COLUMNS": "200", "TMPDIR": str(temp)}
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    for file in tmp_path.glob("**/*pid"):
        with contextlib.suppress(ValueError, ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.fixture
def call_ab() -> Callable[..., tuple[int, str]]:
    """Call the command in this process, where no signal is sent; returns its exit code and output."""

    def call(*arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(ab, [str(word) for word in arguments], env={"COLUMNS": "200"})
        wrong = isinstance(result.exception, RecipeError)
        return (2, str(result.exception)) if wrong else (result.exit_code, result.output)

    return call


@pytest.fixture
def gone() -> Callable[[Path], bool]:
    """Say whether the process whose id is in a file has ended (a zombie has)."""

    def ended(pid_file: Path) -> bool:
        try:
            return psutil.Process(int(pid_file.read_text())).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return ended
