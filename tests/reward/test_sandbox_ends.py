"""Whoever dies, the program, its worker, the worker's reaper or the trainer: no process and no folder stays."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from rl_accel.reward.execution import Limits
from rl_accel.reward.sandbox import Case, Sandbox, SandboxError

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

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
for _ in range(2):
    os.wait()
open("started", "w")
time.sleep(600)
"""
"""A program whose grandchildren have left its session and group."""


def started(temporary):
    return sorted(temporary.glob("*/run/started"))


@pytest.mark.parametrize("victim", ["worker", "reaper"])
async def test_a_worker_that_is_killed_leaves_nothing(victim, processes, temporary, closed_later):
    sandbox = closed_later(Sandbox(1, "process"))
    task = asyncio.create_task(sandbox.run(DAEMON, Case("stdin", ""), LONG))
    (first,) = await processes.eventually(lambda: started(temporary))
    (reaper,) = processes.workers()
    everyone = [reaper.pid, *processes.below(reaper.pid)]
    assert len(everyone) >= 5, "the reaper, the worker, the program and two daemons"
    os.kill(everyone[victim == "worker"], signal.SIGKILL)
    await processes.eventually(lambda: started(temporary) not in ([first], []))  # it runs again, in another worker
    await processes.eventually(lambda: not any(map(processes.is_alive, everyone)))
    await processes.eventually(lambda: len(list(temporary.iterdir())) == 1)
    (again,) = processes.workers()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(processes.below(again.pid)) == 1, "the reaper has its idle worker, and that has nothing"
    assert (await sandbox.run("print(1)", Case("stdin", "", "1"), LONG)).verdict == "passed"
    assert processes.workers() == [again]
    await sandbox.close()
    assert not list(temporary.iterdir())


async def test_closing_stops_what_runs(processes, temporary):
    sandbox = Sandbox(2, "process")
    tasks = [asyncio.create_task(sandbox.run(DAEMON, Case("stdin", ""), LONG)) for _ in range(3)]
    await processes.eventually(lambda: len(started(temporary)) == 2)
    everyone = [pid for reaper in processes.workers() for pid in (reaper.pid, *processes.below(reaper.pid))]
    assert len(everyone) >= 10
    await sandbox.close()
    assert not list(filter(processes.is_alive, everyone))
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in found] == [SandboxError] * 3
    assert not list(temporary.iterdir())


OWNER = """
import asyncio
from rl_accel.reward.sandbox import Case, Limits, Sandbox

async def main():
    sandbox = Sandbox(2, {isolation!r})
    await asyncio.gather(*(sandbox.run({code!r}, Case("stdin", ""), Limits(wall=600)) for _ in range(3)))

asyncio.run(main())
"""


async def test_all_ends_with_a_trainer_that_is_killed(isolation, processes, temporary):
    owner = subprocess.Popen([sys.executable, "-c", OWNER.format(isolation=isolation, code=DAEMON)])
    try:
        # of two workers each: the reaper or bubblewrap, the worker, the program and its two daemons
        everyone = await processes.eventually(lambda: len(below := processes.below(owner.pid)) >= 2 * 5 and below)
    finally:
        owner.kill()
        owner.wait()
    await processes.eventually(lambda: not any(map(processes.is_alive, everyone)))
    await processes.eventually(lambda: not list(temporary.iterdir()))


BESIDE = textwrap.dedent("""
    import asyncio
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
    for folder in ("..", "../.."):
        try:
            print(os.listdir(folder))
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
def test_sandboxes_of_two_processes_share_no_user_and_no_folder(temporary):
    command = [sys.executable, "-c", BESIDE]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=300)[0].splitlines() for process in both]
    assert [len(lines) for lines in outputs] == [12, 12]
    words = [[line.split() for line in lines] for lines in outputs]
    assert all(len(line) == 2 and line[0] == "passed" for lines in words for line in lines), outputs
    users = [{line[1] for line in lines} for lines in words]
    assert not users[0] & users[1]
    assert [len(found) for found in users] == [2, 2]


async def test_folders_that_cannot_be_entered_or_are_too_deep_for_python_are_removed(
    processes, temporary, closed_later
):
    codes = [
        "import os\nos.makedirs('a/b/c'); open('a/b/c/d', 'w').close(); os.chmod('a/b', 0); os.chmod('.', 0)",
        "import os\nfor _ in range(3000): os.mkdir('x' * 50); os.chdir('x' * 50)",
    ]

    sandbox = closed_later(Sandbox(1, "process"))
    for code in codes:
        assert (await sandbox.run(code, Case("stdin", ""), Limits(wall=20))).verdict == "passed", code
    (folder,) = temporary.iterdir()
    await processes.eventually(lambda: not list(folder.iterdir()))
    await sandbox.close()
    assert not list(temporary.iterdir())
