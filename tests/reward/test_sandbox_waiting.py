"""Seconds that a program was ready and had no processor do not count against its wall limit; seconds that it slept do."""

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_accel.reward.execution import Limits
from rl_accel.reward.sandbox import Case, Sandbox

pytestmark = pytest.mark.slow

SCHEDSTAT = Path("/proc/self/schedstat").exists()
WITH_SCHEDSTAT = pytest.mark.skipif(not SCHEDSTAT, reason="this kernel does not say how long a thread waited")
BUSY = "import time\nwhile time.process_time() < 1.0: pass\nprint(1)"


@contextlib.contextmanager
def one_processor(spinners):
    """Keep this process, and all it starts, on one processor, beside others that never rest."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    command = [sys.executable, "-c", "while True: pass"]
    beside = [subprocess.Popen(command, start_new_session=True) for _ in range(spinners)]
    try:
        yield
    finally:
        for process in beside:
            process.kill()
            process.wait()
        os.sched_setaffinity(0, before)


def run(code, limits, spinners):
    async def main():
        sandbox = Sandbox(1, "process")
        try:
            await sandbox.run("pass", Case("stdin", ""))
            with_worker = await sandbox.run(code, Case("stdin", "", "1"), limits)
        finally:
            await sandbox.close()
        return with_worker

    with one_processor(spinners):
        return asyncio.run(main())


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel does not say how long a thread waited"
)
def test_a_program_that_had_to_wait_for_a_processor_is_not_stopped_for_that():
    found = run(BUSY, Limits(wall=1.6, cpu=10), spinners=2)
    assert found.verdict == "passed", found
    assert found.wall > 1.6, "it took longer than its limit"
    assert 0.3 < found.waited < found.wall


def test_a_sleeper_is_stopped_beside_others_too():
    found = run("import time\ntime.sleep(600)", Limits(wall=1.0), spinners=2)
    assert (found.verdict, found.reason) == ("timeout", "wall limit")
    assert 1.0 <= found.wall < 10.0


def test_a_worker_whose_program_waits_long_is_not_taken_for_dead(monkeypatch, caplog):
    monkeypatch.setattr("rl_accel.reward.worker_pool._GRACE_SECONDS", 4.0)
    found = run(BUSY.replace("1.0", "600"), Limits(wall=1.0, cpu=600), spinners=8)
    assert (found.verdict, found.reason) == ("timeout", "wall limit")
    assert "died" not in caplog.text
    if SCHEDSTAT:
        assert found.wall > 1.0 + 4.0


@WITH_SCHEDSTAT
def test_waiting_has_a_bound():
    found = run(BUSY.replace("1.0", "600"), Limits(wall=0.3, cpu=600), spinners=16)
    assert (found.verdict, found.reason) == ("timeout", "wall limit")
    assert found.wall >= 3.0
    assert found.wall - found.waited < 0.3, "what is counted was still within the limit"


def test_processes_that_wait_for_each_other_do_not_earn_time():
    code = f"import os\nfor _ in range(3): os.fork()\n{BUSY.replace('1.0', '600')}"
    found = run(code, Limits(wall=1.0, cpu=600), spinners=0)
    assert (found.verdict, found.reason) == ("timeout", "wall limit")
    assert found.waited <= found.wall - found.cpu + 0.01


def test_processor_time_of_children_that_have_ended_counts():
    code = """
import os, time
for _ in range(20):
    if os.fork() == 0:
        while time.process_time() < 0.3: pass
        os._exit(0)
    os.wait()
"""
    found = run(code, Limits(wall=60, cpu=1.0), spinners=0)
    assert (found.verdict, found.reason) == ("timeout", "cpu limit")
