"""Tests programs that try to stall, fill, outlive or spy on their sandbox: each gets its verdict, and nothing is left."""

import asyncio
import functools
import logging
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from rl_accel.reward import sandbox as sandbox_module
from rl_accel.reward.limited_executor import Limits
from rl_accel.reward.sandbox import Case, Sandbox, SandboxError, bubblewrap_problem

pytestmark = pytest.mark.slow

PRINT = Case("stdin", "", "1")
"""What ``print(1)`` passes."""
SHORT = Limits(wall=1.5, cpu=1.0, memory=256 << 20, output_bytes=100_000, file_bytes=4 << 20, processes=16)
NO_BUBBLEWRAP = bubblewrap_problem()
AS_ROOT = os.geteuid() == 0
AT_ONCE = 4 if AS_ROOT else 1
"""Hostile programs that run at once: those of one user share its limit of processes."""
TEXT = "a\0b é 漢 🙂"
CONNECT = "import socket\ntry: socket.create_connection(('192.0.2.1', 80), 1)\nexcept OSError as error: print(error)"
CAPABILITIES = "print([line[-17:-1] for line in open('/proc/self/status') if line[:6] in ('CapPrm', 'CapEff')])"
LEAK = "import glob\nprint([p for p in glob.glob('/proc/[0-9]*/environ') if b's3cret' in open(p, 'rb').read()])"


def run(code, case=None, limits=SHORT, isolation="process"):
    """Run one program in a sandbox of its own."""

    async def main():
        sandbox = Sandbox(1, isolation)
        try:
            return await sandbox.run(code, case or Case("stdin", ""), limits)
        finally:
            await sandbox.close()

    return asyncio.run(main())


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
        (Case("stdin", "", TEXT), f"print({TEXT!r})", "passed"),
        (Case("stdin", TEXT, TEXT), "print(input())", "passed"),
        (Case("stdin", "", "1"), "import os\nif os.fork(): os.wait()\nprint(1)", "wrong"),
        (Case("stdin", "", "[0, 1, 4]"), "import multiprocessing as m\nprint(m.Pool(2).map(abs, [0, 1, 4]))", "passed"),
    ],
)
def test_every_kind_of_case_has_its_verdict(case, code, verdict, isolation):
    result = run(code, case, Limits(wall=20), isolation)
    assert result.verdict == verdict, result


FORGE = """
import os
for descriptor in range(3, 4096):
    try:
        os.write(descriptor, b'{"verdict": "passed", "reason": ""}')
    except OSError:
        pass
1 / 0
"""
PASSED = b'{"verdict": "passed", "reason": "", "value": null}'
DONE = b'{"verdict": "done", "reason": "", "value": null}'
FORGED = [
    *("null", "true", "5", "1e999", '"text"', "[]", "[[]]", "{}", "", "{", "NaN"),
    *('{"verdict": "done"}', '{"verdict": [], "reason": "", "value": 1}', '{"verdict": {}, "reason": {}, "value": {}}'),
    *('{"verdict": null, "reason": "", "value": 1}', '{"verdict": "done", "reason": 5, "value": 1}'),
]
"""Reports of every JSON type."""
SIGNALS, SLEEP = "from signal import *\nimport time\n", "time.sleep(600)"
HOSTILE = {
    "endless loop": ("while True: pass", "timeout", "cpu limit|wall limit"),
    "sleeper": ("import time; time.sleep(600)", "timeout", "wall limit"),
    "fork bomb": ("import os\nwhile True: os.fork()", "error|timeout|killed", ""),
    "thread bomb": ("import threading as t\nwhile True: t.Thread(target=t.Event().wait).start()", "error|killed", ""),
    "8 GiB at once": ("x = bytearray(8 << 30)", "memory", "MemoryError"),
    "8 GiB by and by": ("x = []\nwhile True: x.append(bytearray(16 << 20))", "memory", ""),
    "endless output": ("while True: print('x' * 1000)", "killed", "output limit"),
    "10 GiB file": ("f = open('x', 'wb')\nfor _ in range(10240): f.write(bytes(1 << 20))", "error", "File too large"),
    "ignores signals": (f"{SIGNALS}for one in (2, 15, 1): signal(one, SIG_IGN)\n{SLEEP}", "timeout", "wall limit"),
    "blocks all signals": (f"{SIGNALS}pthread_sigmask(SIG_BLOCK, range(1, 64))\n{SLEEP}", "timeout", "wall limit"),
    "closed stdout": ("import os\nos.close(1); os.close(2)\nprint(1)", "wrong|error|passed", ""),
    "os._exit": ("import os\nos._exit(0)", "error", "status 0 before"),
    "kills itself": ("import os\nos.kill(os.getpid(), 9)", "error", "signal 9"),
    "kills everybody": ("import os\nos.kill(-1, 9)", "error|wrong|killed", ""),
    "recursion": ("def f(): return f()\nf()", "error", "RecursionError"),
    "stack of C": ("x = []\nfor _ in range(10 ** 6): x = [x]\nrepr(x)", "error", "RecursionError"),
    "lone surrogate": (r"print('\ud800')", "error", "UnicodeEncodeError"),
    "closes every descriptor": ("import os\nos.closerange(0, 4096)", "error", ""),
    "forges its report": (FORGE, "error", ""),
    "a report nested too deep": ("import os\nos.write(200, b'[' * 60000)\nos._exit(0)", "error", "status 0 before"),
    "a verdict of its own": (f"import os\nos.write(200, {PASSED})\nos._exit(0)", "error", "a report of its own"),
    "an output of its own": (f"import os\nos.write(200, {DONE})\nos._exit(0)", "wrong", "other output"),
    "a report without end": ("import os\nwhile True: os.write(200, b'{' * 9999)", "killed", "output limit"),
    "a million lines": ("import os\nfor _ in range(10**6): os.write(200, b'{}\\n')", "killed|error|timeout", ""),
    **{
        f"the report {text}": (f"import os\nos.write(200, b{text!r})\nos._exit(0)", "error", "status 0 before|its own")
        for text in FORGED
    },
    "an exception without text": ("class E(Exception):\n def __str__(self): raise self\nraise E", "error", "E"),
    "removes builtins": ("import builtins\nbuiltins.__dict__.clear()", "error|wrong|passed", ""),
}


def reaches_others(name, isolation):
    return name == "kills everybody" and isolation == "process" and not AS_ROOT and "processes" in shared()


@functools.cache
def outcomes(isolation):
    """The result of each hostile program, by name, and of a harmless one after it."""

    async def main():
        sandbox = Sandbox(AT_ONCE, isolation)

        async def play(code):
            results = await sandbox.run(code, Case("stdin", "", "nothing"), SHORT)
            return results, await sandbox.run("print(1)", PRINT, SHORT)

        await asyncio.gather(*(sandbox.run("pass", PRINT) for _ in range(AT_ONCE)))  # the workers are warm
        names = [name for name in HOSTILE if not reaches_others(name, isolation)]
        results = await asyncio.gather(*(play(HOSTILE[name][0]) for name in names))
        await sandbox.close()
        return dict(zip(names, results, strict=True))

    return asyncio.run(main())


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_gets_its_verdict_in_time(name, isolation):
    if reaches_others(name, isolation):
        pytest.skip("it would reach all of this user's processes, these tests included")
    result, after = outcomes(isolation)[name]
    _, verdict, reason = HOSTILE[name]
    assert re.fullmatch(verdict, result.verdict), result
    assert re.search(reason, result.reason), result
    assert result.wall < 60.0
    assert len(result.output) <= 10_000
    assert after.verdict == "passed", "the next program is not affected"


NESTS = """
import os
def judge(depth):
    os.write(200, b'{"verdict": "done", "reason": "", "value": ' + b"[" * depth + b"]" * depth + b"}")
    os._exit(0)
"""


async def test_a_value_of_any_depth_is_an_answer_and_never_an_exception(isolation, closed_later, tmp_path):
    """A supervisor reads some values that are nested too deep for this process, in which more calls are open."""
    (tmp_path / "judge.py").write_text(NESTS)
    sandbox = closed_later(Sandbox(1, isolation, f"{tmp_path / 'judge.py'}:judge"))
    results = [await sandbox.call_judge({"depth": depth}, SHORT) for depth in (9, *range(860, 1000, 7), 100_000)]
    assert {result.verdict for result in results} == {"done", "error"}
    assert any("nested too deep" in result.reason for result in results)
    assert sandbox.deaths == 0


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


async def test_a_program_cannot_do_anything_to_its_worker(isolation, caplog, closed_later):
    if isolation == "process" and not AS_ROOT and "processes" in shared():
        pytest.skip("the kernel does not let this user hide its worker")
    sandbox = closed_later(Sandbox(AT_ONCE, isolation))
    results = await asyncio.gather(*(sandbox.run(code, Case("stdin", ""), SHORT) for code in AT_THE_WORKER.values()))
    for name, found in zip(AT_THE_WORKER, results, strict=True):
        # without a parent in its namespace, a program can only kill itself
        assert found.reason in ("wall limit", "ended by signal 9"), name
        # its limit held, not the longer one of a worker that is lost
        assert found.wall < 10 * SHORT.wall, name
        assert found.output in ("", "refused"), name
    after = await asyncio.gather(*(sandbox.run("print(1)", PRINT, SHORT) for _ in AT_THE_WORKER))
    assert [found.verdict for found in after] == ["passed"] * len(AT_THE_WORKER)
    assert "died" not in caplog.text, "all in the workers that were there"


@pytest.mark.parametrize(
    ("shared_thing", "code", "output"),
    [
        ("", "import os\nprint(sorted(os.environ))", "['HOME', 'LANG', 'PATH', 'TMPDIR']"),
        ("", "import os\nprint(os.listdir('.'), os.getcwd() == os.environ['HOME'])", "[] True"),
        ("" if AS_ROOT else "files", f"try:\n exec({LEAK!r})\nexcept PermissionError: print('[]')", "[]"),
        # its own and the first one of its namespace
        ("processes", "import os\nprint(len([name for name in os.listdir('/proc') if name.isdigit()]) <= 2)", "True"),
        ("network", CONNECT, "[Errno 101] Network is unreachable"),
        ("", CAPABILITIES, str(["0" * 16] * 2)),
    ],
    ids=["environment", "folder", "environment of others", "processes", "network", "capabilities"],
)
def test_a_program_finds_nothing_of_this_process(shared_thing, code, output, isolation, monkeypatch):
    if isolation == "process" and shared_thing and (shared_thing == "files" or shared_thing in shared()):
        pytest.skip(f"the kernel does not let this user hide {shared_thing}")
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    result = run(code, isolation=isolation)
    assert result.output.strip() == output, result


@pytest.mark.skipif(not AS_ROOT, reason="without root and without bubblewrap a program has the trainer's own user")
@pytest.mark.parametrize("code", ["open('/etc/shadow')", "open('/usr/evil', 'w')", "import os\nos.setuid(0)"])
def test_as_root_a_program_has_no_rights(code):
    result = run(code)
    assert result.verdict == "error", result
    assert "Error" in result.reason


def test_files_in_common_folders_do_not_stay(isolation):
    places = ["/tmp", "/var/tmp", "/dev/shm"]
    code = f"import os\nfor p in {places!r}:\n os.mkdir(p + '/rla-stray'); open(p + '/rla-stray/x', 'w').write('x')\nprint(1)"
    if isolation == "process" and "processes" in shared():
        pytest.skip("the kernel does not let this user have folders of its own")
    assert run(code, PRINT, isolation=isolation).verdict == "passed"
    assert not [p for p in places if Path(p, "rla-stray").exists()]


async def test_a_slot_is_free_only_once_its_program_has_stopped(processes, closed_later):
    sandbox = closed_later(Sandbox(1, "process"))
    task = asyncio.create_task(sandbox.run("import time; time.sleep(600)", Case("stdin", ""), Limits(wall=600)))
    await processes.executing()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.wait({task})
    assert task.cancelled()
    assert len(sandbox._idle) == 1


async def test_programs_wait_for_a_free_worker_and_their_limit_starts_when_they_do(closed_later):
    sandbox = closed_later(Sandbox(2, "process"))
    code = "import time; time.sleep(0.5); print(1)"
    results = await asyncio.gather(*(sandbox.run(code, PRINT, SHORT) for _ in range(8)))
    assert [result.verdict for result in results] == ["passed"] * 8
    assert all(result.wall >= 0.5 for result in results)


async def test_a_program_that_the_kernel_stopped_for_its_processor_time_has_timed_out(processes, closed_later):
    """A worker without a processor looks late; the kernel's own limit on the program strikes before it."""
    sandbox = closed_later(Sandbox(1, "process"))
    task = asyncio.create_task(sandbox.run("while True: pass", Case("stdin", ""), Limits(wall=60, cpu=0.5)))
    (program,) = await processes.executing()
    supervisor = psutil.Process(program).parent()
    supervisor.suspend()
    await processes.eventually(lambda: not processes.is_alive(program))
    supervisor.resume()
    result = await task
    assert (result.verdict, result.reason) == ("timeout", "cpu limit")


async def test_after_many_programs_nothing_is_left(processes, closed_later):
    leaves_a_child = "import os\nif os.fork() == 0:\n import time; time.sleep(600)"
    codes = ["print(1)", "1 / 0", "import os; os._exit(1)", leaves_a_child]
    sandbox = closed_later(Sandbox(2, "process"))
    while len(processes.workers()) < 2:
        await asyncio.gather(*(sandbox.run(code, PRINT, SHORT) for code in codes))
    before = psutil.Process().num_fds()
    await asyncio.gather(*(sandbox.run(codes[number % 4], PRINT, SHORT) for number in range(400)))
    # A kind of program that leaks would leave 100. Other threads of this process open some of their own (Ray's, in a whole suite).
    assert psutil.Process().num_fds() < before + 50
    assert [len(processes.below(worker.pid)) for worker in processes.workers()] in ([0, 0], [1, 1]), (
        "the first processes of their namespaces"
    )
    await sandbox.close()
    assert not processes.workers()


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (lambda: Case("doctest", ""), "kind must be one of stdin, call, found 'doctest'"),
        (lambda: Case("call", "f(2)", "3"), "a call wants JSON"),
        (lambda: Case("call", "[1, [2]]", "3"), r"a call wants \[name, arguments\]"),
        (lambda: Limits(memory=0), "memory must be above 0, found 0"),
        (lambda: Sandbox(0), "workers must be at least 1, found 0"),
    ],
)
def test_a_wrong_order_is_named(order, message):
    with pytest.raises(ValueError, match=message):
        order()


@pytest.mark.skipif(not NO_BUBBLEWRAP, reason="bubblewrap works here")
def test_bubblewrap_that_does_not_work_is_refused_where_it_is_asked_for():
    with pytest.raises(SandboxError, match="bubblewrap does not work here"):
        Sandbox(1, "bubblewrap")


async def test_bubblewrap_may_lie_anywhere_on_the_path_of_this_process(tmp_path, monkeypatch, closed_later):
    (tmp_path / "bwrap").write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done; shift; exec "$@"\n')
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(sandbox_module, "bubblewrap_problem", sandbox_module.bubblewrap_problem.__wrapped__)
    assert (await closed_later(Sandbox(1, "bubblewrap")).run("print(1)", PRINT)).verdict == "passed"


LONG = Limits(wall=600, cpu=600)
DAEMONS = """
import os, signal, time
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        for one in (1, 2, 15): signal.signal(one, signal.SIG_IGN)
        if os.fork() == 0:
            os.setpgid(0, 0)
            time.sleep(600)
        os._exit(0)
for _ in range(2):
    os.wait()
"""
"""Grandchildren of a program that have left its session and group."""
SLEEPS = "time.sleep(600)"


async def test_a_daemon_of_the_program_ends_with_it(isolation, processes, closed_later):
    sandbox = closed_later(Sandbox(2, isolation))
    await sandbox.run("pass", PRINT)
    (worker,) = processes.workers()
    idle = processes.below(worker.pid)
    assert (await sandbox.run(DAEMONS + "print(1)", PRINT, SHORT)).verdict == "passed"
    assert processes.below(worker.pid) == idle


@pytest.mark.parametrize("isolation", ["process"])
async def test_a_supervisor_that_is_killed_leaves_nothing(isolation, processes, closed_later):
    sandbox = closed_later(Sandbox(1, isolation))
    task = asyncio.create_task(sandbox.run(DAEMONS + SLEEPS, Case("stdin", ""), LONG))
    (supervisor,) = await processes.eventually(
        lambda: [one for one in processes.workers() if len(processes.below(one.pid)) >= 4]
    )
    everyone = [supervisor.pid, *processes.below(supervisor.pid)]
    supervisor.kill()
    await processes.eventually(lambda: not any(map(processes.is_alive, everyone)))
    (again,) = await processes.eventually(
        lambda: [one for one in processes.workers() if len(processes.below(one.pid)) >= 4]
    )
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await sandbox.run("print(1)", PRINT, LONG)).verdict == "passed"
    assert processes.workers() == [again]


async def test_closing_stops_what_runs(processes):
    sandbox = Sandbox(2, "process")
    tasks = [asyncio.create_task(sandbox.run(DAEMONS + SLEEPS, Case("stdin", ""), LONG)) for _ in range(3)]
    await processes.eventually(
        lambda: [len(processes.below(one.pid)) >= 4 for one in processes.workers()] == [True] * 2
    )
    everyone = [pid for one in processes.workers() for pid in (one.pid, *processes.below(one.pid))]
    await sandbox.close()
    await processes.eventually(lambda: not any(map(processes.is_alive, everyone)))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in results] == [SandboxError] * 3


OWNER = """
import asyncio
from rl_accel.reward.graders import Graders
from rl_accel.reward.sandbox import Case, Limits, Sandbox

async def main():
    sandbox, graders = Sandbox(2, {isolation!r}), Graders({grader!r}, 1)
    hung = graders.call({{"path": {path!r}, "seconds": 600.0}}, Limits(wall=600))
    await asyncio.gather(hung, *(sandbox.run({code!r}, Case("stdin", ""), Limits(wall=600)) for _ in range(3)))

asyncio.run(main())
"""


async def test_all_ends_with_a_reward_worker_that_is_killed(isolation, processes, tmp_path):
    grader = f"{Path(__file__).with_name('graders_under_test.py')}:leave_daemon"
    daemon = tmp_path / "daemon"
    code = OWNER.format(isolation=isolation, code=DAEMONS + SLEEPS, grader=grader, path=str(daemon))
    owner = subprocess.Popen([sys.executable, "-c", code])
    try:
        # twice a supervisor, a program and its two daemons; the grader's host, its process and the daemon of the call
        await processes.eventually(lambda: daemon.exists() and len(processes.below(owner.pid)) >= 2 * 4 + 3)
        everyone = processes.below(owner.pid)
    finally:
        owner.kill()
        owner.wait()
    await processes.eventually(lambda: not any(map(processes.is_alive, everyone)))


async def test_what_a_program_leaves_is_gone_before_the_next_one(isolation, closed_later):
    codes = [
        "import os\nos.makedirs('a/b/c'); open('a/b/c/d', 'w').close(); os.chmod('a/b', 0); os.chmod('.', 0)",
        "import os\nfor _ in range(3000): os.mkdir('x' * 50); os.chdir('x' * 50)",
        "import os\nos.makedirs('/tmp/a'); os.chmod('/tmp/a', 0)",
    ]
    sandbox = closed_later(Sandbox(1, isolation))
    looks = "import os\nprint(len(os.listdir('.')), [name for name in os.listdir('/tmp') if name == 'a'])"
    for code in codes:
        assert (await sandbox.run(code, Case("stdin", ""), Limits(wall=20))).verdict == "passed", code
        assert (await sandbox.run(looks, Case("stdin", "", "0 []"), Limits(wall=20))).verdict == "passed", code


FILL = "import os\nblock = bytes(1 << 20)\n{}\nprint('held')\nimport time; time.sleep(600)"
MEMORY = {
    "resident": "held = [bytearray(64 << 20) for _ in range(32)]",
    "children": "for _ in range(12):\n if os.fork() == 0:\n  held = os.urandom(100 << 20)\n  break",
    "memfd": "for _ in range(40):\n d = os.memfd_create('x')\n for _ in range(50): os.write(d, block)",
    "/dev/shm": "for n in range(40):\n with open(f'/dev/shm/{n}', 'wb') as file: file.write(block * 50)",
    "/tmp": "for n in range(40):\n with open(f'/tmp/{n}', 'wb') as file: file.write(block * 50)",
    "its folder": "for n in range(40):\n with open(str(n), 'wb') as file: file.write(block * 50)",
    "a mount of its own": "import ctypes; libc = ctypes.CDLL(None)\nassert libc.unshare(0x10020000) == 0, 'refused'",
}


@pytest.mark.parametrize("held", MEMORY)
def test_memory_is_counted_wherever_it_is(held, isolation):
    if isolation == "process" and "processes" in shared():
        pytest.skip("the kernel does not let this user have folders of its own")
    limits = Limits(wall=60.0, cpu=60.0, memory=256 << 20)
    result = run(FILL.format(MEMORY[held]), limits=limits, isolation=isolation)
    assert result.verdict in ("memory", "error"), result
    assert re.search("memory limit|MemoryError|No space left|refused", result.reason), result


@pytest.mark.skipif(not AS_ROOT, reason="only root can run programs as other users")
def test_an_interpreter_that_no_other_user_may_read_is_named(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o700)
    code = f"import sys; from rl_accel.reward import program_process; sys.prefix = {str(tmp_path / 'closed')!r}; "
    command = [sys.executable, "-c", code + "program_process._closed_folders()"]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    assert f"cannot read {tmp_path}/closed: `chmod -R o+rX {tmp_path}/closed` lets it" in said


BUFFERS = """
import socket
held, pairs = 0, [socket.socketpair() for _ in range(100)]
for one in (end for pair in pairs for end in pair):
    one.setblocking(False)
    try:
        while True: held += one.send(bytes(1 << 16))
    except BlockingIOError: pass
print(held > (30 << 20))
"""


def test_what_no_counter_shows_may_be_more_than_the_limit(isolation):
    """SECURITY.md says so. If this fails, the page promises too little."""
    limits = Limits(wall=60.0, cpu=60.0, memory=28 << 20)
    assert run(BUFFERS, Case("stdin", "", "True"), limits, isolation).verdict == "passed"


def test_a_folder_that_everybody_may_write_is_hidden_by_bubblewrap_only(isolation):
    """SECURITY.md says so."""
    if not all(part.stat().st_mode & 0o001 for part in Path(__file__).parents):
        pytest.skip("another user cannot enter the folder of this test")
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        Path(folder).chmod(0o777)
        result = run(f"open({folder + '/left'!r}, 'w')\nprint(1)", PRINT, isolation=isolation)
        assert result.verdict == ("passed" if isolation == "process" else "error"), result
        assert Path(folder, "left").exists() == (isolation == "process")


WITHOUT_NAMESPACES = """
import asyncio, psutil
from rl_accel.reward.sandbox import Case, Limits, Sandbox

CODES = {codes!r}

async def main():
    sandbox = Sandbox(1, "process")
    for code in CODES:
        limits = Limits(wall=5, memory=256 << 20, processes=16)
        print((await sandbox.run(code, Case("stdin", "", "1"), limits)).verdict)
    (supervisor,) = psutil.Process().children()
    print(len(supervisor.children()))
    await sandbox.close()

asyncio.run(main())
"""


AS_ROOT_OF_MANY_USERS = """
import ctypes, os, sys
from rl_accel.reward import program_process

wait, go_on = os.pipe()
helper = os.fork()
if helper == 0:
    os.read(wait, 1)
    program_process._map_users(os.getppid(), 1 << 16)
    os._exit(0)
assert ctypes.CDLL(None).unshare(1 << 28 | 1 << 17) == 0
os.write(go_on, b"g")
os.waitpid(helper, 0)
program_process._mount("none", "/", None, program_process._MS_REC_PRIVATE)
for folder in program_process._closed_folders():  # such as /root, if the interpreter lies there
    program_process._cover(folder, "mode=0755,size=1m")
open("/proc/sys/user/max_user_namespaces", "w").write("0")
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""


@pytest.mark.parametrize("user", ["root of a container", "other user"])
def test_without_namespaces_limits_and_kills_hold_and_what_is_shared_is_said(user):
    """In a user namespace that may make no others, as in many containers."""
    if user == "root of a container" and not AS_ROOT:
        pytest.skip("only root can map other users")
    fills = "x = []\nwhile True: x.append(bytearray(16 << 20))"
    codes = [DAEMONS + "print(1)", f"import time\n{SLEEP}", fills, "import os\nwhile True: os.fork()", "print(1)"]
    codes.append("import os\nassert os.getuid() == 60600\ntry: open('/etc/shadow')\nexcept PermissionError: print(1)")
    program = WITHOUT_NAMESPACES.format(codes=codes)
    shell = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" -c "$1"'
    command = ["unshare", "-Ur", "sh", "-c", shell, sys.executable, program]
    if user == "root of a container":
        command = [sys.executable, "-c", AS_ROOT_OF_MANY_USERS, program]
    done = subprocess.run(command, capture_output=True, text=True)
    if "unshare" in done.stderr or "max_user_namespaces" in done.stderr:
        pytest.skip(f"no user namespace can be made here: {done.stderr}")
    *verdicts, left = done.stdout.split()
    assert verdicts[:3] + verdicts[4:5] == ["passed", "timeout", "memory", "passed"], done
    assert verdicts[3] in ("killed", "error", "timeout")
    assert verdicts[5] == ("passed" if user == "root of a container" else "error")
    assert left == "0"
    files = "" if user == "root of a container" else " and files"
    assert f"untrusted programs share this user's network and processes{files}\n" in done.stderr
