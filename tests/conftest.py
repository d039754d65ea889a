"""Fixtures shared by all tests. Code in a process of its own gets a clean environment and a time limit."""

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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


@pytest.fixture
def start_ray(short_tmp, clean_environment) -> Iterator[Callable[..., str]]:
    """``start_ray(num_cpus=2, num_gpus=0, **env)`` starts a cluster of its own and returns the address; ends it afterwards."""
    with ExitStack() as stack:

        def start(num_cpus: int = 2, num_gpus: int = 0, **env: str) -> str:
            options = (
                f"--num-cpus={num_cpus} --num-gpus={num_gpus} --include-dashboard=false --temp-dir={short_tmp / 'r'}"
            )
            head = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "ray.scripts.scripts",
                    "start",
                    "--head",
                    "--block",
                    "--port=0",
                    *options.split(),
                ],
                env={**clean_environment, "RAY_AUTH_MODE": "disabled", **env},
                cwd=short_tmp,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            stack.callback(head.stdout.close)
            stack.callback(head.wait, timeout=60)
            stack.callback(head.terminate)  # with --block it ends the processes that it started
            output = []
            for line in head.stdout:
                output.append(line)
                if "--address=" in line:
                    return line.split("--address='")[1].split("'")[0]
            raise RuntimeError("no Ray cluster: " + "".join(output))

        yield start
