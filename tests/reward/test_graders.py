"""Tests processes of trusted graders: values, state, errors, hangs, and processes that a stopped call has started."""

import asyncio
import logging
import math
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import requests

from rl_accel.reward import graders as graders_module
from rl_accel.reward import program_process
from rl_accel.reward.graders import Graders, SandboxError
from rl_accel.reward.limited_executor import Limits

pytestmark = pytest.mark.slow

HERE = Path(__file__).with_name("graders_under_test.py")
SHORT = Limits(wall=1.0, cpu=1.0)


@pytest.fixture
def graders(closed_later):
    """``graders("echo", workers=1, **options)`` opens graders of that function."""
    return lambda name, workers=1, **options: closed_later(Graders(f"{HERE}:{name}", workers, **options))


async def test_a_value_comes_back_as_it_was(graders):
    pool = graders("echo")
    nested = {"score": 1.0, "acc": [True, (1, "é")]}
    for value in (None, 0.5, math.inf, nested, "漢", {1, 2}, 10**30, b"x" * 5_000_000, "y" * 5_000_000):
        result = await pool.call({"value": value})
        assert result.verdict == "done", result
        assert type(result.value) is type(value)
        assert result.value == value


async def test_the_level_debug_shows_processes_and_calls_without_arguments(graders, caplog):
    caplog.set_level("DEBUG", "rl_accel")
    assert (await graders("echo").call({"value": "a secret"})).verdict == "done"
    assert any(line.startswith(f"rl-accel: 1 processes serve {HERE}:echo") for line in caplog.messages)
    assert any(re.search(r"process \d+ of .*: done after \d", line) for line in caplog.messages)
    assert "secret" not in caplog.text


async def test_arguments_may_have_a_position_and_are_copies(graders):
    pool, notes, texts = graders("add_notes"), {"old": 1}, ["a"]
    result = await pool.call({"texts": texts}, None, (notes, 5))
    assert (result.value, notes, texts) == (5, {"old": 1}, ["a"])


class Heavy:
    """Counts how often it is sent."""

    sent = 0

    def __reduce__(self):
        Heavy.sent += 1
        return str, ("received",)


async def test_an_argument_that_is_the_same_in_all_calls_is_sent_once(graders):
    heavy, before = Heavy(), Heavy.sent
    pool = graders("echo", constants={"value": heavy})
    assert [(await pool.call({"value": value})).value for value in (heavy, heavy, "another")] == [
        "received", "received", "another"
    ]  # fmt: skip
    assert Heavy.sent - before == 1


async def test_a_file_is_found_by_its_own_path_even_if_it_is_a_link_to_a_file_with_another_name(tmp_path, closed_later):
    (tmp_path / "stored").write_text("def compute(): return open(__file__.replace('grader.py', 'data')).read()")
    folder = tmp_path / "shown"
    folder.mkdir()
    (folder / "data").write_text("next to the link")
    (folder / "grader.py").symlink_to(tmp_path / "stored")
    pool = closed_later(Graders(f"{folder}/grader.py:compute", 1))
    assert (await pool.call({})).value == "next to the link"


@pytest.mark.parametrize(
    ("kwargs", "verdict", "reason"),
    [
        ({"code": "raise ValueError('no such thing')"}, "error", "ValueError: no such thing"),
        ({"codes": ""}, "error", "TypeError: .*unexpected keyword argument"),
        ({"code": "import threading; score = threading.Lock()"}, "error", "pickle '_thread.lock'"),
        ({"code": "import time; time.sleep(600)"}, "timeout", "wall limit"),
        ({"code": "while True: pass"}, "timeout", "wall limit"),
        ({"code": "import os; os._exit(3)"}, "killed", "its process ended with 3"),
    ],
)
@pytest.mark.parametrize("is_forked", [True, False], ids=["forked", "imported by each process"])
async def test_what_goes_wrong_has_its_verdict(is_forked, kwargs, verdict, reason, graders, monkeypatch):
    monkeypatch.syspath_prepend(HERE.parent)
    pool = graders("execute", modules=() if is_forked else ("starts_a_thread",))
    result = await pool.call(kwargs, SHORT)
    assert result.verdict == verdict, result
    assert result.value is None
    assert re.search(reason, result.reason), result
    if "sleep" in kwargs.get("code", ""):
        assert result.wall >= 1.0
    assert (await pool.call({"code": "score = 1"})).value == 1, "the next call is not affected"
    assert pool.deaths == 0


async def test_a_call_whose_process_a_signal_ends_is_made_again_once(tmp_path, graders):
    pool = graders("execute")
    dies = f"import os\nwith open({str(tmp_path / 'calls')!r}, 'a') as file: file.write('x')\nos.kill(os.getpid(), 9)"
    result = await pool.call({"code": dies}, SHORT)
    assert (result.verdict, result.reason) == ("killed", "a signal ended two processes that called it")
    assert ((tmp_path / "calls").read_text(), pool.deaths) == ("xx", 2)


async def test_a_trusted_grader_may_compute_on_more_cores_than_one(graders):
    limits = Limits(wall=60, cpu=0.2, latest=lambda: (60, 0.1), check_seconds=0.05)
    code = "import time\nbegan = time.process_time()\nwhile time.process_time() < began + 1.0: pass\nscore = 1.0"
    found = await graders("execute").call({"code": code}, limits)
    assert (found.verdict, found.value) == ("done", 1.0), found


async def test_a_module_may_have_ended_children_reaped_by_the_kernel(tmp_path, closed_later):
    (tmp_path / "g.py").write_text("from signal import *\nsignal(SIGCHLD, SIG_IGN)\ndef grade(text): return text")
    pool = closed_later(Graders(f"{tmp_path / 'g.py'}:grade", 1))
    assert [(await pool.call({"text": "a"})).value for _ in range(2)] == ["a", "a"]


async def test_a_process_waits_for_the_rest_of_a_message_where_the_user_has_set_a_default_timeout_of_sockets():
    """``socket.setdefaulttimeout`` makes sockets non-blocking, and a process that inherits such a socket does not know it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        data = program_process.frame(b"12")
        ours.sendall(data[:-1])
        threading.Timer(0.2, ours.sendall, [data[-1:]]).start()
        assert program_process.Channel(theirs).receive() == b"12"


async def test_a_grader_whose_import_ends_its_process_is_named_even_if_a_child_lives_on(tmp_path, closed_later):
    (tmp_path / "g.py").write_text("import os, time\nif os.fork():\n    os._exit(3)\ntime.sleep(600)\n")
    with pytest.raises(SandboxError, match="ended while it was imported"):
        await closed_later(Graders(f"{tmp_path / 'g.py'}:compute", 1)).call({})


async def test_quick_calls_share_the_module_of_one_process(graders):
    code = "import builtins\nscore = builtins.calls = getattr(builtins, 'calls', 0) + 1"
    pool = graders("execute", 4)
    one_by_one = [(await pool.call({"code": code})).value for _ in range(2)]
    together = await asyncio.gather(*(pool.call({"code": code}) for _ in range(2)))
    assert [*one_by_one, *sorted(result.value for result in together)] == [1, 2, 3, 4]


async def test_calls_that_wait_run_at_once_and_draw_other_random_numbers(tmp_path, graders):
    """Each of six waits until all have begun."""
    code = "import random, time\nfrom pathlib import Path\n(Path({0!r}) / str(random.random())).touch()\n"
    code += "while len(list(Path({0!r}).iterdir())) < 6: time.sleep(0.01)\nscore = 1"
    pool = graders("execute", 6)
    calls = (pool.call({"code": code.format(str(tmp_path))}, Limits(wall=100)) for _ in range(6))
    assert [result.value for result in await asyncio.gather(*calls)] == [1] * 6


@pytest.mark.parametrize(("busy", "several"), [(lambda _pid: 0.0, True), (lambda _pid: time.monotonic(), False)])
async def test_short_calls_run_at_once_if_processes_mostly_wait(busy, several, graders, monkeypatch):
    monkeypatch.setattr(graders_module, "busy_seconds", busy)
    pool = graders("execute", 4, computing=1)
    calls = (pool.call({"code": "import os, time\ntime.sleep(0.05)\nscore = os.getpid()"}) for _ in range(40))
    results = await asyncio.gather(*calls)
    assert (len({result.value for result in results}) > 1) is several


async def test_a_process_is_busy_while_it_computes_or_has_no_processor(processes):
    programs = [subprocess.Popen(command) for command in (["sh", "-c", "while :; do :; done"], ["sleep", "600"])]
    try:
        computes, sleeps = (program.pid for program in programs)
        await processes.eventually(lambda: program_process.busy_seconds(computes) > 1.0)
        assert program_process.busy_seconds(sleeps) < 0.5
    finally:
        for program in programs:
            program.kill()
            program.wait()


@pytest.mark.parametrize("target", ["threads_at_import:wait", "plain:wait"], ids=["spawned", "forked"])
async def test_a_grader_is_imported_once_for_all_workers_if_a_fork_of_it_is_safe(target, tmp_path, closed_later):
    """A fork of a process with threads, such as those of torch, would hang where it waits for them."""
    module = "import os, threading, time\nfrom pathlib import Path\nHERE = Path({!r})\n"
    module += "with open(HERE / 'imports', 'a') as file: file.write('x')\n"
    module += "def wait():\n    (HERE / f'{{os.getpid()}}.pid').touch()\n"
    module += "    while len(list(HERE.glob('*.pid'))) < 2: time.sleep(0.01)\n    return threading.active_count()\n"
    thread = "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    stem = target.partition(":")[0]
    (tmp_path / f"{stem}.py").write_text(module.format(str(tmp_path)) + thread * (stem != "plain"))
    pool = closed_later(Graders(f"{tmp_path}/{stem}.py:wait", 2))
    results = await asyncio.gather(*(pool.call({}, Limits(wall=100)) for _ in range(2)))
    alone = stem == "plain"
    assert [result.value for result in results] == [1 if alone else 2] * 2, "threads that the import starts are there"
    assert (tmp_path / "imports").read_text() == ("x" if alone else "xx")


async def test_graders_that_cannot_be_forked_have_no_more_workers_than_asked_for(tmp_path, closed_later):
    text = "import os, threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    (tmp_path / "threads.py").write_text(text + "def score():\n    time.sleep(0.5)\n    return os.getpid()\n")
    pool = closed_later(Graders(f"{tmp_path}/threads.py:score", 1))
    results = await asyncio.gather(*(pool.call({}, Limits(wall=100)) for _ in range(4)))
    assert len({result.value for result in results}) == 1


async def test_a_file_called_like_a_package_that_it_imports_and_classes_of_its_own(tmp_path, closed_later):
    text = "import enum\nfrom psutil import Process\nclass Own(dict): pass\nclass Kind(enum.IntEnum):\n    RIGHT = 1\n"
    text += "class Bad(Exception): pass\ndef score(raises):\n    if raises: raise Bad('no')\n"
    (tmp_path / "psutil.py").write_text(text + "    return Own(score=Kind.RIGHT, of=Process().pid)\n")
    pool = closed_later(Graders(f"{tmp_path / 'psutil.py'}:score", 1))
    result = await pool.call({"raises": False})
    assert isinstance(result.value, dict), result
    assert (type(result.value).__name__, result.value["score"], result.value["score"].name) == ("Own", 1, "RIGHT")
    error = (await pool.call({"raises": True})).error
    assert (type(error).__name__, str(error)) == ("Bad", "no")
    assert "psutil.py" in "".join(error.__notes__), "the traceback of the other process"


async def test_an_error_keeps_its_class_and_text_even_if_the_text_needs_what_cannot_be_sent(graders):
    code = "import requests, threading\nclass Own(requests.HTTPError):\n    def __init__(self, lock, *, status):\n"
    code += "        self.lock, self.status = lock, status\n"
    code += "    def __str__(self): return f'{self.status} {type(self.lock).__name__}'\nraise Own(threading.Lock(), status=500)"
    error = (await graders("execute").call({"code": code})).error
    assert isinstance(error, requests.HTTPError)
    assert (type(error).__name__, str(error), error.status) == ("Own", "500 lock", 500)


async def test_what_a_grader_started_lives_as_long_as_it_and_ends_at_once_when_stopped(processes, tmp_path, graders):
    pool, first, second = graders("leave_daemon"), tmp_path / "first", tmp_path / "second"
    assert (await pool.call({"path": str(first)})).value == 1.0
    assert processes.is_alive(int(first.read_text()))
    task = asyncio.create_task(pool.call({"path": str(second), "seconds": 600.0}))
    daemon = int(await processes.eventually(lambda: second.exists() and second.read_text()))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await processes.eventually(lambda: not processes.is_alive(daemon))
    await processes.eventually(lambda: not processes.is_alive(int(first.read_text())))


async def test_the_caller_environment_folder_and_output_are_the_graders(monkeypatch, capfd, graders):
    monkeypatch.setenv("RLA_OF_CALLER", "yes")
    result = (await graders("where").call({})).value
    assert (result["cwd"], result["value"], result["uid"]) == (os.getcwd(), "yes", os.getuid())
    await graders("execute").call({"code": "score = 0.0\nprint('said by the grader')"})
    assert "said by the grader" in capfd.readouterr().out


async def test_a_grader_logs_as_it_would_in_the_callers_process(tmp_path, monkeypatch, capfd, closed_later):
    (tmp_path / "logs.py").write_text("import logging\ndef grade(): logging.getLogger('a').info('graded')\n")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [handler])
    for level in (logging.INFO, logging.WARNING):
        monkeypatch.setattr(root, "level", level)
        assert (await closed_later(Graders(f"{tmp_path}/logs.py:grade", 1)).call({})).verdict == "done"
        assert ("[a] graded" in capfd.readouterr().err) == (level == logging.INFO)


async def test_a_factory_is_called_once_and_the_callers_path_is_searched(tmp_path, monkeypatch, graders, closed_later):
    result = await graders("make", arguments={"factor": 3}).call({"value": 4})
    assert result.value == {"value": 12, "made_before": True}
    (tmp_path / "scores.py").write_text("def score(x): return x + 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    sys.path.append(tmp_path)  # a Path, as scripts of users add it by mistake
    of_module = closed_later(Graders("scores:score", 1))  # a name that one of our own files has
    assert (await of_module.call({"x": 1})).value == 2


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("absent", None, "AttributeError: .*absent"),
        ("NO_FUNCTION", None, "TypeError: .*NO_FUNCTION must be a function, found 7"),
        ("make_number", {}, "must be a function, found 7"),
        ("make", {"facto": 1}, "unexpected keyword argument"),
    ],
)
async def test_a_target_that_is_none_is_named(name, arguments, reason, graders):
    with pytest.raises(SandboxError, match=reason):
        await graders(name, arguments=arguments).call({})


async def test_wrong_targets_and_arguments_are_named(graders):
    for wrong, said in (("os.path.join",), "target must be 'module:function'"), (("os.path:join", 0), "1, found 0"):
        with pytest.raises(ValueError, match=said):
            Graders(*wrong)
    with pytest.raises(SandboxError, match=r"echo runs in another process, to which .* cannot be sent: .*lock"):
        await graders("echo").call({"value": threading.Lock()})
    assert (await graders("echo").call({"value": lambda: 1})).value() == 1


async def test_an_import_that_fails_says_where(tmp_path, closed_later):
    path = tmp_path / "broken.py"
    path.write_text("x = 1\nimport nothing_here\n\ndef score(): return 1\n")
    graders = closed_later(Graders(f"{path}:score", 2))
    where = "ModuleNotFoundError: No module named 'nothing_here' .*broken.py, line 2: import nothing_here"
    with pytest.raises(SandboxError, match=where):
        await asyncio.gather(*(graders.call({}) for _ in range(4)))


async def test_a_process_that_cannot_be_started_for_any_reason_is_an_error_of_the_call(monkeypatch, graders):
    monkeypatch.setattr(socket, "socketpair", lambda: math.sqrt(-1))
    with pytest.raises(SandboxError, match=r"a process of .* cannot be started: ValueError\('math domain error'\)"):
        await asyncio.wait_for(graders("echo").call({"value": 1}), 30)


async def test_a_grader_that_only_one_process_can_import_serves_all_calls_from_it(tmp_path, closed_later, caplog):
    (tmp_path / "port.py").write_text(
        "import socket, time\n"
        "held = socket.socket(socket.AF_UNIX)\n"
        f"held.bind({str(tmp_path / 'port')!r})\n"
        "def judge(): time.sleep(0.5); return 1.0\n"
    )
    pool = closed_later(Graders(f"{tmp_path}/port.py:judge", 4))
    results = await asyncio.gather(*(pool.call({}) for _ in range(4)))
    assert [(result.verdict, result.value) for result in results] == [("done", 1.0)] * 4
    assert "1 processes serve" in caplog.text
    assert "because another cannot start: OSError: [Errno 98]" in caplog.text


async def test_until_a_process_has_given_a_correct_answer_it_has_the_time_that_others_needed(graders):
    pool, limits = graders("sleep"), Limits(wall=0.3, cpu=0.3, full=30.0)

    async def call(seconds, kind="a"):
        return await pool.call({"seconds": seconds}, replace(limits, kind=kind))

    first = await call(1.0)
    assert first.verdict == "done", "while nothing is known, the full budget"
    first.prove()
    stopped = await call(600.0)
    assert (stopped.verdict, stopped.prove) == ("timeout", None), "a process that has given a correct answer"
    assert (await call(1.0)).verdict == "done", "a new process"
    assert (await call(1.0, "b")).verdict == "done", "another kind of call"
    stopped = await call(600.0)
    assert stopped.verdict == "timeout"
    assert 2.0 < stopped.wall < 20.0, "twice the second of the first process, and the limit"


async def test_a_script_that_forgets_to_close_ends_all_the_same(processes):
    code = f"""
import asyncio
from rl_accel.reward.graders import Graders
async def main():
    graders = Graders("{HERE}:where", 1)
    print((await graders.call({{}})).value["pid"])
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    await processes.eventually(lambda: not processes.is_alive(int(done.stdout)))


async def test_processes_that_die_idle_are_replaced_and_no_call_is_blamed(processes, graders):
    """A call gives up only after two processes have died over it, whatever the number that died idle."""
    pool = graders("echo", 1)
    for kills, deaths in enumerate((0, 2, 3, 5)):  # a host that is killed takes the process that it has forked along
        assert (await pool.call({"value": kills})).value == kills
        assert pool.deaths == deaths
        (host,) = processes.workers()
        (serving,) = processes.below(host.pid)
        os.kill(serving if kills % 2 else host.pid, signal.SIGKILL)
        await processes.eventually(lambda serving=serving: not processes.is_alive(serving))
        await processes.eventually(lambda: pool._idle[0].gone)


async def test_a_host_that_dies_without_other_processes_is_replaced_and_counted(processes, graders):
    pool = graders("sleep", 1)
    assert (await pool.call({"seconds": 600.0}, SHORT)).verdict == "timeout"
    (host,) = processes.workers()
    assert processes.below(host.pid) == []
    host.kill()
    await processes.eventually(lambda: pool._template.gone)
    assert (await pool.call({"seconds": 0.0})).value == 0.0
    assert pool.deaths == 1


async def test_a_pool_that_lost_processes_while_others_started_has_all_of_them_again(
    processes, tmp_path, graders, monkeypatch
):
    """Each of six calls waits until all six have begun. One process is killed as soon as there are three."""
    code = "import os, time\nfrom pathlib import Path\n(Path({0!r}) / str(os.getpid())).touch()\n"
    code += "while len(list(Path({0!r}).iterdir())) < 7: time.sleep(0.01)\nscore = 1"
    pool = graders("execute", 6)
    fork, forks = graders_module._Process.fork, []

    async def killed_as_it_starts(template):
        process = await fork(template)
        forks.append(process)
        if len(forks) == 3:
            process.channel.shutdown(socket.SHUT_RDWR)
        return process

    monkeypatch.setattr(graders_module._Process, "fork", killed_as_it_starts)
    (tmp_path / "one more").touch()
    calls = (pool.call({"code": code.format(str(tmp_path))}, Limits(wall=300)) for _ in range(6))
    assert [result.value for result in await asyncio.gather(*calls)] == [1] * 6
    assert len(pool._serving) == 6


async def test_closing_while_a_process_starts_says_that_and_not_that_it_took_long(tmp_path, closed_later, caplog):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    pool = closed_later(Graders(f"{tmp_path}/slow.py:compute", 1))
    call = asyncio.create_task(pool.call({}))
    while not pool._all:
        await asyncio.sleep(0.01)
    await pool.close()
    with pytest.raises(SandboxError, match="the graders are closed"):
        await call
    assert "300" not in caplog.text


async def test_a_module_that_this_process_has_imported_is_not_replaced_by_a_file_of_its_name(
    tmp_path, monkeypatch, closed_later
):
    """In stock, ``import statistics`` of a grader finds the module that is imported already."""
    (tmp_path / "statistics.py").write_text("def grade(): return 'a file of the user'")
    (tmp_path / "own.py").write_text("import statistics\ndef grade(): return statistics.mean([1, 3])")
    monkeypatch.syspath_prepend(tmp_path)
    assert (await closed_later(Graders("own:grade", 1)).call({})).value == statistics.mean([1, 3])
    assert (await closed_later(Graders("statistics:mean", 1)).call({"data": [1, 3]})).value == 2


async def test_a_process_asks_for_a_value_only_when_the_grader_reads_it(tmp_path, closed_later):
    (tmp_path / "asks.py").write_text(
        "import pickle\nfrom rl_accel.reward.grader_process import ask\ndef grade(name): return ask(name, 7)\n"
    )
    asked = []

    def provide(name, version):
        asked.append((name, version))
        return 8, b"x"

    pool = closed_later(Graders(f"{tmp_path}/asks.py:grade", 1))
    assert (await pool.call({"name": "a"}, provide=provide)).value == (8, b"x")
    assert (await pool.call({"name": "b"})).value == (-1, None)
    assert asked == [("a", 7)]
