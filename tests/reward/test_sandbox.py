"""Programs that try to stall, fill, outlive or look into what runs them; each gets its verdict, and nothing is left."""

import asyncio
import functools
import logging
import os
import re
import signal
import time
from pathlib import Path

import pytest

from rl_accel.reward.execution import Limits
from rl_accel.reward.sandbox import Case, Sandbox, SandboxError, bubblewrap_problem

pytestmark = pytest.mark.slow

SHORT = Limits(wall=1.5, cpu=1.0, memory=256 << 20, output_bytes=100_000, file_bytes=4 << 20, processes=16)
NO_BUBBLEWRAP = bubblewrap_problem()
AS_ROOT = os.geteuid() == 0


def play(work, workers=2, isolation="process"):
    """Run ``work(sandbox)`` and close the sandbox."""

    async def main():
        sandbox = Sandbox(workers, isolation)
        try:
            return await work(sandbox)
        finally:
            await sandbox.close()

    return asyncio.run(main())


def run(code, case=None, limits=SHORT, isolation="process"):
    return play(lambda sandbox: sandbox.run(code, case or Case("stdin", ""), limits), isolation=isolation)


@functools.cache
def shared():
    """What programs share with these tests where bubblewrap is not used, as the warning says."""
    said, logger = [], logging.getLogger("rl_accel")

    def note(record):
        said.append(record.getMessage())
        return True

    logger.addFilter(note)
    run("pass")
    logger.removeFilter(note)
    return " ".join(said)


@pytest.mark.parametrize(
    ("case", "code", "verdict"),
    [
        (Case("stdin", "20\n22\n", "42"), "print(int(input()) + int(input()))", "passed"),
        (Case("stdin", "1\n", "2\n"), "print(3)", "wrong"),
        (Case("stdin", "", "a\nb"), "print('a  ')\nprint('b')\nprint()", "passed"),
        (Case("stdin", "never read " * 100_000, "1"), "print(1)", "passed"),
        (Case("stdin", "", "1"), "import sys\nprint(1)\nsys.exit()", "passed"),
        (Case("stdin", "", ""), "import sys\nsys.exit(3)", "error"),
        (Case("stdin", "", ""), "1 / 0", "error"),
        (Case("stdin", "", ""), "def broken(:", "error"),
        (Case("call", '["f", [2, [3]]]', "[3, 2]"), "def f(a, b): return [b[0], a]", "passed"),
        (Case("call", '["f", [2]]', "3"), "def f(a): return a", "wrong"),
        (Case("call", '["g", [2]]', "3"), "def f(a): return a", "error"),
        (Case("call", '["f", []]', "1"), "def f(): return object()", "error"),
        (Case("stdin", "", "1"), "import os\nif os.fork(): os.wait()\nprint(1)", "wrong"),
        (Case("stdin", "", "[0, 1, 4]"), "import multiprocessing as m\nprint(m.Pool(2).map(abs, [0, 1, 4]))", "passed"),
    ],
)
def test_every_kind_of_case_has_its_verdict(case, code, verdict, isolation):
    found = run(code, case, Limits(wall=20), isolation)
    assert found.verdict == verdict, found


HOSTILE = {
    "endless loop": ("while True: pass", "timeout", "cpu limit|wall limit"),
    "sleeper": ("import time; time.sleep(600)", "timeout", "wall limit"),
    "fork bomb": ("import os\nwhile True: os.fork()", "error|timeout|killed", ""),
    "thread bomb": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,)).start()",
        "error|killed",
        "",
    ),
    "8 GiB at once": ("x = bytearray(8 << 30)", "memory", "MemoryError"),
    "8 GiB by and by": ("x = []\nwhile True: x.append(bytearray(16 << 20))", "memory", ""),
    "endless output": ("while True: print('x' * 1000)", "killed", "output limit"),
    "10 GiB file": ("f = open('x', 'wb')\nfor _ in range(10240): f.write(bytes(1 << 20))", "error", "File too large"),
    "ignores signals": (
        "import signal, time\nfor s in (2, 15, 1): signal.signal(s, signal.SIG_IGN)\ntime.sleep(600)",
        "timeout",
        "wall limit",
    ),
    "blocks all signals": (
        "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\ntime.sleep(600)",
        "timeout",
        "wall limit",
    ),
    "closed stdout": ("import os\nos.close(1); os.close(2)\nprint(1)", "wrong|error|passed", ""),
    "os._exit": ("import os\nos._exit(0)", "error", "status 0 before"),
    "kills itself": ("import os\nos.kill(os.getpid(), 9)", "error", "signal 9"),
    "kills everybody": ("import os\nos.kill(-1, 9)", "error|wrong|killed", ""),
    "recursion": ("def f(): return f()\nf()", "error", "RecursionError"),
    "stack of C": ("x = []\nfor _ in range(10 ** 6): x = [x]\nrepr(x)", "error", "RecursionError"),
    "lone surrogate": (r"print('\ud800')", "error", "UnicodeEncodeError"),
    "closes every descriptor": ("import os\nos.closerange(0, 4096)", "error", ""),
    "forges its report": (
        """
import os
for descriptor in range(3, 4096):
    try:
        os.write(descriptor, b'{"verdict": "passed", "reason": ""}')
    except OSError:
        pass
1 / 0
""",
        "error",
        "",
    ),
    "a report nested too deep": ("import os\nos.write(200, b'[' * 60000)\nos._exit(0)", "error", "status 0 before"),
    "a verdict of its own": (
        """import os\nos.write(200, b'{"verdict": "done", "reason": ""}')\nos._exit(0)""",
        "error",
        "a report of its own",
    ),
    "an exception without text": ("class E(Exception):\n def __str__(self): raise self\nraise E", "error", "E"),
    "removes builtins": ("import builtins\nbuiltins.__dict__.clear()", "error|wrong|passed", ""),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_gets_its_verdict_in_time(name, isolation):
    if name == "kills everybody" and isolation == "process" and not AS_ROOT and "processes" in shared():
        pytest.skip("it would reach all of this user's processes, these tests included")
    code, verdict, reason = HOSTILE[name]

    async def work(sandbox):
        await sandbox.run("pass", Case("stdin", ""), SHORT)  # the worker is warm
        began = time.monotonic()
        found = await sandbox.run(code, Case("stdin", "", "nothing"), SHORT)
        seconds = time.monotonic() - began
        after = await sandbox.run("print(1)", Case("stdin", "", "1"), SHORT)
        return found, seconds, after

    found, seconds, after = play(work, isolation=isolation)
    assert re.fullmatch(verdict, found.verdict), found
    assert re.search(reason, found.reason), found
    assert seconds < 60.0
    assert len(found.output) <= 10_000
    assert after.verdict == "passed", "the next program is not affected"


PTRACE = """
import ctypes, os, time
os.write(1, b"attached" if ctypes.CDLL(None).ptrace({request}, os.getppid(), 0, 0) == 0 else b"refused")
time.sleep(600)
"""
AT_THE_WORKER = {
    "stops it": "import os, signal, time\ntry: os.kill(os.getppid(), signal.SIGSTOP)\nfinally: time.sleep(600)",
    "kills it": "import os, signal, time\ntry: os.kill(os.getppid(), signal.SIGKILL)\nfinally: time.sleep(600)",
    "attaches to it": PTRACE.format(request=16),
    "seizes it": PTRACE.format(request=0x4206),
}


@pytest.mark.parametrize("name", AT_THE_WORKER)
def test_a_program_cannot_do_anything_to_its_worker(name, isolation, caplog):
    if isolation == "process" and not AS_ROOT and "processes" in shared():
        pytest.skip("the kernel does not let this user hide its worker")

    async def work(sandbox):
        found = await sandbox.run(AT_THE_WORKER[name], Case("stdin", ""), SHORT)
        return found, (await sandbox.run("print(1)", Case("stdin", "", "1"), SHORT)).verdict

    found, after = play(work, workers=1, isolation=isolation)
    assert (found.verdict, found.reason) == ("timeout", "wall limit")
    assert found.wall - found.waited < 5 * SHORT.wall, "its limit held, not the longer one of a worker that is lost"
    assert found.output in ("", "refused")
    assert after == "passed"
    assert "died" not in caplog.text, "all in one worker"


def test_null_bytes_and_every_character_come_through():
    text = "a\0b é 漢 🙂"
    assert run(f"print({text!r})", Case("stdin", "", text)).verdict == "passed"
    assert run("print(input())", Case("stdin", text, text)).verdict == "passed"


def test_the_environment_is_empty_and_the_folder_private(isolation, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    code = "import os\nprint(sorted(os.environ), os.listdir('.'), os.getcwd() == os.environ['HOME'])"
    found = run(code, isolation=isolation)
    assert found.output.strip() == "['HOME', 'LANG', 'PATH', 'TMPDIR'] [] True"
    leak = "import glob\nprint([p for p in glob.glob('/proc/[0-9]*/environ') if b's3cret' in open(p, 'rb').read()])"
    found = run(f"try:\n exec({leak!r})\nexcept PermissionError: print('[]')", isolation=isolation)
    if AS_ROOT or isolation == "bubblewrap":
        assert found.output.strip() == "[]", found


def test_a_program_sees_no_process_but_its_own(isolation):
    if isolation == "process" and "processes" in shared():
        pytest.skip("the kernel does not let this user hide them")
    code = "import os\nprint(len([name for name in os.listdir('/proc') if name.isdigit()]))"
    found = run(code, isolation=isolation)
    assert int(found.output) <= 2, "its own and its worker"


def test_a_program_has_no_network(isolation):
    if isolation == "process" and "network" in shared():
        pytest.skip("the kernel does not let this user leave it")
    found = run("import socket\nsocket.create_connection(('192.0.2.1', 80), 1)", isolation=isolation)
    assert "unreachable" in found.reason, found


def test_a_program_has_no_capabilities(isolation):
    code = "print([line.split()[1] for line in open('/proc/self/status') if line.startswith(('CapPrm', 'CapEff'))])"
    assert run(code, isolation=isolation).output.strip() == str(["0" * 16] * 2)


@pytest.mark.skipif(not AS_ROOT, reason="without root and without bubblewrap a program has the trainer's own user")
@pytest.mark.parametrize(
    "code",
    [
        "print(open('/etc/shadow').read())",
        "open('/usr/evil', 'w')",
        "import socket\nsocket.create_connection(('192.0.2.1', 80), 1)",
        "import socket, os\ns = socket.create_server(('127.0.0.1', 0)); socket.create_connection(('192.0.2.2', 22), 1)",
        "import os\nos.setuid(0)",
        "import os\nos.kill(os.getppid(), 9)",
    ],
)
def test_as_root_a_program_has_no_rights_and_no_network(code):
    found = run(code)
    assert found.verdict == "error", found
    assert "Error" in found.reason


def test_a_daemon_of_the_program_ends_with_it(isolation, processes):
    code = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.setpgid(0, 0)
        time.sleep(600)
    os._exit(0)
os.wait()
print(1)
"""

    async def work(sandbox):
        found = await sandbox.run(code, Case("stdin", "", "1"), SHORT)
        (worker,) = processes.workers()
        return found, len(processes.below(worker.pid))

    found, left = play(work, isolation=isolation)
    assert found.verdict == "passed"
    assert left == 1, "the worker"


def test_files_in_common_folders_do_not_stay(isolation):
    places = ["/tmp", "/var/tmp", "/dev/shm"]
    code = f"import os\nfor p in {places!r}:\n os.mkdir(p + '/rla-stray'); open(p + '/rla-stray/x', 'w').write('x')\nprint(1)"
    if not AS_ROOT and isolation == "process":
        pytest.skip("only told by their owner, or kept in folders of bubblewrap's own")
    assert run(code, Case("stdin", "", "1"), isolation=isolation).verdict == "passed"
    assert not [p for p in places if Path(p, "rla-stray").exists()]


def test_a_cancelled_call_stops_its_program_at_once(processes):
    async def work(sandbox):
        task = asyncio.create_task(sandbox.run("import time; time.sleep(600)", Case("stdin", ""), Limits(wall=600)))
        await processes.executing()
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        seconds = time.monotonic() - began
        verdict = (await sandbox.run("print(1)", Case("stdin", "", "1"), SHORT)).verdict
        return seconds, verdict, [len(processes.below(worker.pid)) for worker in processes.workers()]

    seconds, verdict, left = play(work)
    assert seconds < 30.0
    assert verdict == "passed"
    assert left == [1], "the reaper has its idle worker, and that has nothing"


def test_a_killed_worker_is_replaced_and_its_program_runs_again(processes):
    async def work(sandbox):
        code = "import time; time.sleep(0.8); print(1)"
        task = asyncio.create_task(sandbox.run(code, Case("stdin", "", "1"), Limits(wall=5)))
        (worker,) = await processes.executing()
        below = processes.below(worker.pid)
        worker.kill()
        return await task, below

    result, below = play(work)
    assert result.verdict == "passed"
    assert not list(filter(processes.is_alive, below)), "the program dies with its worker"


def test_programs_wait_for_a_free_worker_and_their_limit_starts_when_they_do():
    async def work(sandbox):
        code = "import time; time.sleep(0.5); print(1)"
        return await asyncio.gather(*(sandbox.run(code, Case("stdin", "", "1"), SHORT) for _ in range(8)))

    results = play(work)
    assert [result.verdict for result in results] == ["passed"] * 8
    assert all(result.wall >= 0.5 for result in results)


def test_processor_time_is_that_of_the_whole_tree():
    code = """
import os, time
for _ in range(2):
    if os.fork() == 0:
        while time.process_time() < 0.3: pass
        os._exit(0)
os.wait(), os.wait()
"""
    found = run(code, limits=Limits(wall=10))
    assert found.cpu >= 0.55


def test_a_program_that_the_kernel_stopped_for_its_processor_time_has_timed_out(processes):
    """A worker without a processor looks late; the kernel's own limit on the program strikes before it."""

    async def work(sandbox):
        task = asyncio.create_task(sandbox.run("while True: pass", Case("stdin", ""), Limits(wall=60, cpu=0.5)))
        (reaper,) = await processes.executing()
        worker, program = processes.below(reaper.pid)
        os.kill(worker, signal.SIGSTOP)
        await processes.eventually(lambda: not processes.is_alive(program))
        os.kill(worker, signal.SIGCONT)
        return await task

    found = play(work, workers=1)
    assert (found.verdict, found.reason) == ("timeout", "cpu limit")


def test_after_many_programs_nothing_is_left(processes, temporary):
    def open_files():
        return len(os.listdir("/proc/self/fd"))

    codes = [
        "print(1)",
        "1 / 0",
        "import os; os._exit(1)",
        "import os\nif os.fork() == 0:\n import time; time.sleep(600)",
    ]

    async def work(sandbox):
        await asyncio.gather(*(sandbox.run(code, Case("stdin", "", "1"), SHORT) for code in codes))
        before = open_files()
        runs = (sandbox.run(codes[number % 4], Case("stdin", "", "1"), SHORT) for number in range(400))
        await asyncio.gather(*runs)
        return before, open_files(), [len(processes.below(worker.pid)) for worker in processes.workers()]

    before, after, children = play(work)
    assert after == before
    assert children == [1, 1], "the workers themselves"
    assert not list(temporary.iterdir())
    assert not processes.workers()


def test_wrong_orders_are_named():
    with pytest.raises(ValueError, match="kind must be one of stdin, call, found 'doctest'"):
        Case("doctest", "")
    with pytest.raises(ValueError, match="a call wants JSON"):
        Case("call", "f(2)", "3")
    with pytest.raises(ValueError, match=r"a call wants \[name, arguments\]"):
        Case("call", "[1, [2]]", "3")
    with pytest.raises(ValueError, match="memory must be above 0, found 0"):
        Limits(memory=0)
    with pytest.raises(ValueError, match="workers must be at least 1, found 0"):
        Sandbox(0)
    if NO_BUBBLEWRAP:
        with pytest.raises(SandboxError, match="bubblewrap does not work here"):
            Sandbox(1, "bubblewrap")
