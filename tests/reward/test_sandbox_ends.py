"""Whoever dies, the program, its worker, the worker's reaper or the trainer: no process and no folder stays."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rl_accel.reward.execution import Limits
from rl_accel.reward.sandbox import Case, Sandbox, SandboxError, bubblewrap_problem

pytestmark = pytest.mark.slow

LONG = Limits(wall=600, cpu=600)
DAEMON = """
import os, signal, time
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        for one in (1, 2, 15): signal.signal(one, signal.SIG_IGN)
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
open("started", "w")
time.sleep(600)
"""
"""A program whose grandchildren have left its session and group."""


def family(pid):
    """All processes below ``pid``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            child = int(path.parent.name)
            found += [child, *family(child)]
    return found


def living(pids):
    found = []
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(pid)
        except OSError:
            continue
    return found


def eventually(condition, seconds=60.0):
    last = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < last, "it did not come to pass"
        time.sleep(0.02)
    return found


async def eventually_async(condition, seconds=60.0):
    last = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < last, "it did not come to pass"
        await asyncio.sleep(0.02)
    return found


@pytest.mark.parametrize("victim", ["worker", "reaper", "both"])
def test_a_worker_that_is_killed_leaves_nothing(victim):
    async def main():
        sandbox = Sandbox(1, "process")
        task = asyncio.create_task(sandbox.run(DAEMON, Case("stdin", ""), LONG))
        base = await eventually_async(lambda: sandbox._pool._folder and Path(sandbox._pool._folder.path))
        await eventually_async(lambda: list(base.glob("0/run/started")))
        (process,) = (worker.process for worker in sandbox._pool.workers)
        everyone = family(process.pid)
        assert len(everyone) >= 4, "the worker, the program and two daemons"
        worker = everyone[0]
        if victim == "both":
            os.killpg(process.pid, signal.SIGKILL)  # what ends a session, ends the reaper
        else:
            os.kill(worker if victim == "worker" else process.pid, signal.SIGKILL)
        await eventually_async(lambda: list(base.glob("1/run/started")))  # it runs again, in another worker
        await eventually_async(lambda: not living(everyone))
        left = [path.name for path in base.iterdir()]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await sandbox.close()
        return left, base

    left, base = asyncio.run(main())
    assert left == ["1"]
    assert not base.exists()


def test_closing_stops_what_runs():
    async def main():
        sandbox = Sandbox(2, "process")
        tasks = [asyncio.create_task(sandbox.run(DAEMON, Case("stdin", ""), LONG)) for _ in range(3)]
        base = await eventually_async(lambda: sandbox._pool._folder and Path(sandbox._pool._folder.path))
        await eventually_async(lambda: len(list(base.glob("*/run/started"))) == 2)
        everyone = [
            pid for worker in sandbox._pool.workers for pid in (worker.process.pid, *family(worker.process.pid))
        ]
        await sandbox.close()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        return found, living(everyone), base

    found, left, base = asyncio.run(main())
    assert [type(error) for error in found] == [SandboxError] * 3
    assert left == []
    assert not base.exists()


OWNER = """
import asyncio, sys
from rl_accel.reward.sandbox import Case, Limits, Sandbox

async def main():
    sandbox = Sandbox(2, {isolation!r})
    tasks = [asyncio.create_task(sandbox.run({code!r}, Case("stdin", ""), Limits(wall=600))) for _ in range(3)]
    while sandbox._pool._folder is None and {isolation!r} == "process":
        await asyncio.sleep(0.01)
    print(sandbox._pool._folder.path if sandbox._pool._folder else "", flush=True)
    await asyncio.gather(*tasks)

asyncio.run(main())
"""


def test_after_the_trainer_was_killed_the_next_sandbox_cleans_up():
    code = OWNER.format(isolation="process", code=DAEMON)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        base = Path(owner.stdout.readline().strip())
        eventually(lambda: len(list(base.glob("*/run/started"))) == 2)
        everyone = family(owner.pid)
        owner.kill()
    assert len(everyone) >= 10, "two reapers, workers and programs, and four daemons"
    eventually(lambda: not living(everyone))
    eventually(lambda: not list(base.iterdir()))

    async def main():
        sandbox = Sandbox(1, "process")
        try:
            return await sandbox.run("print(1)", Case("stdin", "", "1"))
        finally:
            await sandbox.close()

    assert base.exists()
    assert asyncio.run(main()).verdict == "passed"
    assert not base.exists()


@pytest.mark.skipif(bool(bubblewrap_problem()), reason=f"bubblewrap: {bubblewrap_problem()}")
def test_with_bubblewrap_all_ends_with_the_trainer():
    code = OWNER.format(isolation="bubblewrap", code=DAEMON)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        try:
            owner.stdout.readline()
            # of two workers each: bubblewrap, the worker, the program and its two daemons
            everyone = eventually(lambda: len(living(found := family(owner.pid))) >= 2 * 5 and found)
        finally:
            owner.kill()
    eventually(lambda: not living(everyone))


BESIDE = textwrap.dedent("""
    import asyncio, sys
    from rl_accel.reward.sandbox import Case, Limits, Sandbox

    code = '''
    import os, time
    print(os.getuid(), flush=True)
    open("/tmp/rla-" + str(os.getuid()), "w").close()
    names = []
    for _ in range(30):
        names.append(len(os.listdir(".")))
        time.sleep(0.01)
    assert names == [0] * 30, names
    assert os.getcwd() == os.environ["HOME"]
    f = lambda: 1
    try:
        print(os.listdir("../.."))
    except PermissionError:
        pass
    '''

    async def main():
        sandbox = Sandbox(2, "process")
        limits = Limits(processes=4)
        calls = [sandbox.run(code, Case("call", '["f", []]', "1"), limits) for _ in range(12)]
        for found in await asyncio.gather(*calls):
            print(found.verdict, found.reason, found.output.replace("\\n", " "))
        await sandbox.close()

    asyncio.run(main())
""").replace("    code = '''\n", "code = '''\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run programs as other users")
def test_sandboxes_of_two_processes_share_no_user_and_no_folder():
    command = [sys.executable, "-c", BESIDE]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=300)[0].splitlines() for process in both]
    assert [len(lines) for lines in outputs] == [12, 12]
    assert all(line.startswith("passed") for lines in outputs for line in lines), outputs
    users = [{line.split()[1] for line in lines} for lines in outputs]
    assert not users[0] & users[1]
    assert [len(found) for found in users] == [2, 2]


def test_folders_that_cannot_be_entered_or_are_too_deep_for_python_are_removed():
    codes = [
        "import os\nos.makedirs('a/b/c'); open('a/b/c/d', 'w').close(); os.chmod('a/b', 0); os.chmod('.', 0)",
        "import os\nfor _ in range(3000): os.mkdir('x' * 50); os.chdir('x' * 50)",
    ]

    async def main():
        sandbox = Sandbox(1, "process")
        found = [await sandbox.run(code, Case("stdin", ""), Limits(wall=20)) for code in codes]
        base = Path(sandbox._pool._folder.path)
        await eventually_async(lambda: not list((base / "0").iterdir()))
        await sandbox.close()
        return found, base

    found, base = asyncio.run(main())
    assert [result.verdict for result in found] == ["passed", "passed"], found
    assert not base.exists()
