"""Fixtures with recipes that run ``toy_trainer.py`` in a process, and ``rl-accel ab`` in a separate process."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_accel.lab.ab.cli import ab
from rl_accel.lab.ab.recipe import Recipe, load
from rl_accel.lab.ab.runner import RunResult
from rl_accel.lab.ab.stats import RunData

TRAINER = Path(__file__).with_name("toy_trainer.py")
TOY = {"name": "toy", "description": "A toy that counts. The reward rises by 0.04 a step.", "baseline": "stock"}
TOY |= {"arms": {"stock": {"overrides": ["adv=0.4"]}, "accelerated": {"overrides": ["adv=0.1"]}}, "steps": 8}
TOY |= {"command": ["python", str(TRAINER)], "steps_overrides": ["steps=${steps}"], "seed_overrides": ["seed=${seed}"]}


@pytest.fixture
def recipe_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes a toy recipe with changed top-level keys, or a file with only these keys beside it. Returns the path."""

    def write(file: str | None = None, **changes: Any) -> Path:
        path = tmp_path / "recipe" / (file or "recipe.yaml")
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(changes if file else TOY | changes, sort_keys=False))
        return path

    return write


@pytest.fixture
def make_runs(recipe_file, tmp_path) -> Callable[..., tuple[Recipe, list[RunResult], list[RunData]]]:
    """Returns a toy recipe with changed top-level keys, and results and metrics of runs given as ``"arm-seed0" -> steps``.

    Steps are a list of metrics, or metrics by step. ``files`` are texts by the name of a run and the path in its folder.
    """
    command = ["p", "a=[1, 2]", "data.train_batch_size=32", "data.train_batch_size=4"]

    def make(runs, files=None, **changes):
        results, data = [], []
        for name, steps in runs.items():
            arm, seed = name.split("-seed")
            steps = steps if isinstance(steps, dict) else dict(enumerate(steps, 1))
            results.append(RunResult(arm, int(seed), 6, command, {"E": "1", "F": None}, "done", 0, message="why"))
            if steps:
                data.append(RunData(arm, int(seed), steps, command, tmp_path / name))
            for path, text in (files or {}).get(name, {}).items():
                file = tmp_path / name / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
        return load(recipe_file(**changes)), results, data

    return make


def _heed_signals() -> None:
    """Restores signals that ``nohup`` and a shell's ``&`` have a test run ignore, which the command would inherit and respect."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def start_ab(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts ``rl-accel ab`` in a process. All its processes are killed after the test."""
    started: list[subprocess.Popen[str]] = []
    temp = tmp_path / "t"
    temp.mkdir()

    def start(*arguments: object) -> "subprocess.Popen[str]":
        words = [sys.executable, "-m", "rl_accel", "ab", *map(str, arguments)]
        env = {**os.environ, "COLUMNS": "200", "TMPDIR": str(temp)}
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(words, env=env, start_new_session=True, preexec_fn=_heed_signals, **output)
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
def call_ab(invoke, monkeypatch) -> Callable[..., str]:
    """Calls ``rl-accel ab`` in this process with ``invoke``, for tests that send no signal."""
    monkeypatch.setenv("COLUMNS", "200")
    return partial(invoke, ab)
