"""Tests that the wall limit does not count seconds in which a program waits for a processor, but counts seconds of sleep."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_accel.reward.limited_executor import Limits
from rl_accel.reward.sandbox import Case, Sandbox

pytestmark = pytest.mark.slow

SCHEDSTAT = Path("/proc/self/schedstat").exists()
BUSY = "import time\nwhile time.process_time() < 1.0: pass\nprint(1)"
IN_TURN = f"""
import subprocess, sys
for _ in range(3):
    subprocess.run([sys.executable, "-ISc", {BUSY.replace("1.0", "0.35")!r}], stdout=subprocess.DEVNULL)
print(1)
"""
ENDLESS = BUSY.replace("1.0", "600")


@pytest.fixture
def run(closed_later):
    """``await run(code, limits, spinners)`` on one processor, beside so many processes that never rest."""

    async def run(code, limits, spinners):
        before, command = os.sched_getaffinity(0), [sys.executable, "-c", "while True: pass"]
        os.sched_setaffinity(0, {max(before)})  # of this process and all it starts
        beside = [subprocess.Popen(command, start_new_session=True) for _ in range(spinners)]
        try:
            sandbox = closed_later(Sandbox(1, "process"))
            await sandbox.run("pass", Case("stdin", ""))
            result = await sandbox.run(code, Case("stdin", "", "1"), limits)
            await sandbox.close()
            return result
        finally:
            for process in beside:
                process.kill()
                process.wait()
            os.sched_setaffinity(0, before)

    return run


@pytest.mark.skipif(not SCHEDSTAT, reason="this kernel does not say how long a thread waited")
@pytest.mark.parametrize("code", [BUSY, IN_TURN], ids=["one process", "one after the other"])
async def test_a_program_that_had_to_wait_for_a_processor_is_not_stopped_for_that(run, code):
    result = await run(code, Limits(wall=1.6, cpu=10), spinners=2)
    assert result.verdict == "passed", result
    assert result.wall > 1.6, "it took longer than its limit"


async def test_a_sleeper_is_stopped_beside_others_too(run):
    result = await run("import time\ntime.sleep(600)", Limits(wall=1.0), spinners=2)
    assert (result.verdict, result.reason) == ("timeout", "wall limit")
    assert 1.0 <= result.wall < 10.0


async def test_waiting_has_a_bound_and_a_worker_whose_program_waits_is_not_taken_for_dead(monkeypatch, caplog, run):
    monkeypatch.setattr("rl_accel.reward.sandbox._GRACE_SECONDS", 4.0)
    result = await run(ENDLESS, Limits(wall=0.6, cpu=600), spinners=16)
    assert (result.verdict, result.reason) == ("timeout", "wall limit")
    assert "died" not in caplog.text
    if SCHEDSTAT:
        assert result.wall >= 6.0, "longer than the limit and the grace period of a worker"


async def test_processes_that_wait_for_each_other_do_not_earn_time(run):
    code = f"import os\nfor _ in range(3): os.fork()\n{ENDLESS}"
    result = await run(code, Limits(wall=1.0, cpu=600), spinners=0)
    assert (result.verdict, result.reason) == ("timeout", "wall limit")


async def test_processor_time_of_children_that_have_ended_counts(run):
    code = """
import os, time
for _ in range(20):
    if os.fork() == 0:
        while time.process_time() < 0.3: pass
        os._exit(0)
    os.wait()
"""
    result = await run(code, Limits(wall=60, cpu=1.0), spinners=0)
    assert (result.verdict, result.reason) == ("timeout", "cpu limit")
    assert result.cpu > 0.95
