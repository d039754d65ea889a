"""The patches in the real slime, where SLIME_ROOT names a checkout of it: with one rank and with two context-parallel ones."""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = os.environ.get("SLIME_ROOT", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ROOT, reason="slime itself is absent: SLIME_ROOT names no checkout of it"),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_advantages_are_slimes_in_slimes_own_module(ranks):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name("real.py"))]
    env = {**os.environ, "PYTHONPATH": ROOT, "WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = []
    try:
        for rank in range(ranks):
            processes.append(subprocess.Popen(command, env={**env, "RANK": str(rank)}, **output))
        for rank, process in enumerate(processes):
            output, _ = process.communicate(timeout=240)
            assert process.returncode == 0, output[-4000:]
            assert f"36 comparisons agree on rank {rank} of {ranks}" in output
    finally:
        for process in processes:
            process.kill()
            process.wait()
