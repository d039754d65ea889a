"""Fixtures shared by all tests. Code in a process of its own gets a clean environment and a time limit."""

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent

# Flags of whoever runs the tests must not reach the processes that the tests start.
_OURS = ("RL_ACCEL_", "VERL_", "RAY_RUNTIME_ENV_HOOK", "RAY_ADDRESS")


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the checkout."""
    return REPO


@pytest.fixture(scope="session")
def clean_environment() -> dict[str, str]:
    """The environment for child processes: this one less every flag, without hub access or usage reports."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_OURS)}
    return {**kept, "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture
def python(clean_environment, tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a Python script in a fresh process outside the checkout: ``python(source, RL_ACCEL_CONFIG=...)``."""

    def run(source: str, *, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(source))
        return subprocess.run(
            [sys.executable, str(script)],
            env={**clean_environment, **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A temporary folder with a short path: Ray's socket names must fit in 107 characters."""
    path = Path(tempfile.mkdtemp(prefix="rla", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
