"""Tests graders, persistent or isolated: values, state, errors, hangs, and processes that a stopped call has started."""

import asyncio
import logging
import math
import os
import re
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import requests

from rl_accel.reward import worker, worker_pool
from rl_accel.reward.sandbox import Graders, Limits, SandboxError

pytestmark = pytest.mark.slow

HERE = Path(__file__).with_name("graders_under_test.py")
SHORT = Limits(wall=1.0, cpu=1.0)
AS_ROOT = os.geteuid() == 0


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


async def test_arguments_may_have_a_position_and_what_the_grader_changes_in_them_is_changed_here(graders):
    pool, notes, texts = graders("add_notes"), {"old": 1}, ["a"]
    result = await pool.call({"texts": texts}, None, (notes, 5))
    assert (result.value, notes, texts) == (5, {"new": 5}, ["a", "b"])


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


FORGED = r"""
import os
os.write(200, b'{"verdict": "done", "reason": ""}' + b"\ncos\nsystem\n(Vtouch evil\ntR.")
os._exit(0)
"""


@pytest.mark.parametrize(
    ("isolation", "kwargs", "verdict", "reason"),
    [
        (None, {"code": "raise ValueError('no such thing')"}, "error", "ValueError: no such thing"),
        (None, {"codes": ""}, "error", "TypeError: .*unexpected keyword argument"),
        (None, {"code": "import threading; score = threading.Lock()"}, "error", "pickle '_thread.lock'"),
        (None, {"code": "import time; time.sleep(600)"}, "timeout", "wall limit"),
        (None, {"code": "while True: pass"}, "timeout", "(cpu|wall) limit"),
        (None, {"code": "import os; os._exit(3)"}, "killed", "its process ended with 3"),
        ("process", {"code": "score = bytearray(8 << 30)"}, "error", "MemoryError"),
        ("process", {"code": "while True: pass"}, "timeout", "limit"),
        ("process", {"code": "import fractions\nscore = fractions.Fraction(1, 2)"}, "error", "returns numbers, text"),
        ("process", {"code": FORGED}, "error", "its value cannot be read: JSONDecodeError"),
    ],
)
async def test_what_goes_wrong_has_its_verdict(isolation, kwargs, verdict, reason, graders):
    limits = Limits(wall=5, cpu=1, memory=256 << 20) if isolation else SHORT
    pool = graders("execute", isolation=isolation)
    result = await pool.call(kwargs, limits)
    assert result.verdict == verdict, result
    assert result.value is None
    assert re.search(reason, result.reason), result
    if "sleep" in kwargs.get("code", ""):
        assert result.wall >= 1.0
        assert result.cpu < 1.0
        assert result.waited < result.wall
    assert (await pool.call({"code": "score = 1"})).value == 1, "the next call is not affected"
    assert pool.deaths == 0


async def test_a_grader_that_a_signal_ends_is_killed_whatever_earlier_calls_have_used(graders):
    pool = graders("execute")
    await pool.call({"code": "import time\nwhile time.process_time() < 1.5: pass"}, Limits(wall=60, cpu=60))
    result = await pool.call({"code": "import os; os.kill(os.getpid(), 9)"}, SHORT)
    assert (result.verdict, result.reason) == ("killed", "its process ended with -9")


async def test_a_trusted_grader_may_compute_on_more_cores_than_one(graders):
    limits = Limits(wall=60, cpu=0.2, latest=lambda: (60, 0.1), check_seconds=0.05)
    code = "import time\nbegan = time.process_time()\nwhile time.process_time() < began + 1.0: pass\nscore = 1.0"
    found = await graders("execute").call({"code": code}, limits)
    assert (found.verdict, found.value) == ("done", 1.0), found


async def test_a_module_may_have_ended_children_reaped_by_the_kernel(tmp_path, closed_later):
    (tmp_path / "g.py").write_text("from signal import *\nsignal(SIGCHLD, SIG_IGN)\ndef grade(text): return text")
    pool = closed_later(Graders(f"{tmp_path / 'g.py'}:grade", 1))
    assert [(await pool.call({"text": "a"})).value for _ in range(2)] == ["a", "a"]


async def test_a_worker_waits_for_the_rest_of_a_message_where_the_user_has_set_a_default_timeout_of_sockets():
    """``socket.setdefaulttimeout`` makes sockets non-blocking, and a process that inherits such a socket does not know it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        data = worker.encode({"a": 1}, b"payload")
        ours.sendall(data[:-1])
        threading.Timer(0.2, ours.sendall, [data[-1:]]).start()
        assert worker.Channel(theirs).next() == ({"a": 1}, b"payload")


async def test_a_grader_whose_import_ends_its_process_is_named_even_if_a_child_lives_on(tmp_path, closed_later):
    (tmp_path / "g.py").write_text("import os, time\nif os.fork():\n    os._exit(3)\ntime.sleep(600)\n")
    with pytest.raises(SandboxError, match="ended while it was imported"):
        await closed_later(Graders(f"{tmp_path / 'g.py'}:compute", 1)).call({})


async def test_calls_of_a_trusted_grader_share_its_module_and_isolated_ones_nothing_but_the_import(graders):
    code = "import builtins\nscore = builtins.calls = getattr(builtins, 'calls', 0) + 1"
    for isolation, seen in ((None, [1, 2, 3, 4]), ("process", [1, 1, 1, 1])):
        pool = graders("execute", 4, isolation=isolation)
        one_by_one = [(await pool.call({"code": code})).value for _ in range(2)]
        together = await asyncio.gather(*(pool.call({"code": code}) for _ in range(2)))
        assert [*one_by_one, *sorted(result.value for result in together)] == seen, "quick calls keep to one worker"


async def test_calls_that_wait_run_at_once_and_draw_other_random_numbers(tmp_path, graders):
    """Each of six waits until all have begun."""
    code = "import random, time\nfrom pathlib import Path\n(Path({0!r}) / str(random.random())).touch()\n"
    code += "while len(list(Path({0!r}).iterdir())) < 6: time.sleep(0.01)\nscore = 1"
    pool = graders("execute", 6)
    calls = (pool.call({"code": code.format(str(tmp_path))}, Limits(wall=100)) for _ in range(6))
    assert [result.value for result in await asyncio.gather(*calls)] == [1] * 6


async def test_short_calls_that_wait_run_at_once_too_and_short_ones_that_compute_do_not(graders):
    wait, compute = "time.sleep(0.05)", "start = time.process_time()\nwhile time.process_time() < start + 0.02: pass"
    for code, several in ((wait, True), (compute, False)):
        pool, text = graders("execute", 4, computing=1), f"import os, time\n{code}\nscore = os.getpid()"
        results = await asyncio.gather(*(pool.call({"code": text}) for _ in range(40)))
        assert (len({result.value for result in results}) > 1) is several


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


async def test_a_limit_that_rises_holds_for_the_wait_for_an_answer_too(monkeypatch, graders):
    monkeypatch.setattr(worker_pool, "_GRACE_SECONDS", 0.5)
    pool = graders("execute", isolation="process")
    await pool.call({"code": "score = 1"}, Limits(wall=100))  # the worker is there
    limits = Limits(wall=1.0, latest=lambda: (100.0, 100.0), check_seconds=0.1)
    result = await pool.call({"code": "import time; time.sleep(3); score = 1"}, limits)
    assert (result.verdict, result.value, pool.deaths) == ("done", 1, 0)


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
    workers = processes.workers()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not processes.is_alive(daemon)
    assert not processes.is_alive(int(first.read_text()))
    assert processes.workers() == workers


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
    (tmp_path / "watch.py").write_text("def score(x): return x + 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    sys.path.append(tmp_path)  # a Path, as scripts of users add it by mistake
    of_module = closed_later(Graders("watch:score", 1))  # a name that one of the worker's own files has
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
    with pytest.raises(SandboxError, match=r"a worker cannot be started: ValueError\('math domain error'\)"):
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
    assert "the number of grader processes stays at 1, because another cannot start: OSError: [Errno 98]" in caplog.text


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


async def test_a_call_is_made_again_once_if_its_worker_dies(processes, tmp_path, graders):
    pool = graders("sleep")
    task = asyncio.create_task(pool.call({"path": str(tmp_path)}, Limits(wall=100)))
    for number in (1, 2):
        await processes.eventually(lambda number=number: len(list(tmp_path.iterdir())) == number)
        (worker,) = processes.workers()
        if number == 2:
            waiting = asyncio.create_task(pool.call({}, SHORT))
            await asyncio.sleep(0.5)  # longer than a waiting call waits for a second worker, of which there is none
        worker.kill()
    result = await task
    assert (result.verdict, result.reason) == ("killed", "two workers died while running it")
    assert pool.deaths == 2
    assert (await asyncio.wait_for(waiting, 60)).verdict == "timeout", "who waited for that worker gets the next one"


async def test_a_limited_grader_may_execute_what_it_grades(graders):
    pool = graders("execute", isolation="process")
    for code, value in (
        ("import os\nscore = sorted(os.environ)", ["HOME", "LANG", "PATH", "TMPDIR"]),
        ("import os\nscore = (os.listdir('.'), os.getcwd() == os.environ['HOME'])", [[], True]),
        ("print('x' * 10000)\nscore = 1", 1),
        ("import numpy as n\nscore = {'a': n.float32(0.5), 'b': n.arange(2)}", {"a": 0.5, "b": [0, 1]}),
        ("import multiprocessing as m\nscore = m.Pool(2).map(abs, [0, -1])", [0, 1]),
    ):
        result = await pool.call({"code": code}, Limits(wall=60, cpu=60))
        assert (result.verdict, result.value) == ("done", value), code


async def test_an_isolated_grader_reads_what_it_is_shown_and_no_other_file_of_the_users(isolation, tmp_path, graders):
    shown, hidden = tmp_path / "shown", tmp_path / "hidden"
    for path in (shown, hidden):
        path.write_text(path.name)
        path.chmod(0o600)
    pool = graders("make_reader", isolation=isolation, readable=[shown], arguments={"path": str(shown)})
    made_with, of_shown, of_hidden = (await pool.call({"paths": [str(shown), str(hidden)]})).value
    assert made_with == "shown"
    if isolation == "bubblewrap":
        assert (of_shown, of_hidden) == ("shown", "FileNotFoundError")
    elif AS_ROOT:
        assert of_hidden == "PermissionError"


async def test_a_script_that_forgets_to_close_ends_all_the_same(processes):
    code = f"""
import asyncio
from rl_accel.reward import worker, worker_pool
from rl_accel.reward.sandbox import Graders
async def main():
    graders = Graders("{HERE}:where", 1)
    print((await graders.call({{}})).value["pid"])
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    await processes.eventually(lambda: not processes.is_alive(int(done.stdout)))


async def test_workers_that_die_idle_are_replaced_and_no_call_is_blamed(processes, graders):
    """A call gives up only after two workers have died over it, whatever the number that died idle."""
    pool = graders("echo", 3)
    for deaths in range(4):
        assert (await pool.call({"value": deaths})).value == deaths
        assert pool.deaths == deaths
        (reaper,) = processes.workers()
        dying = [reaper.pid, *processes.below(reaper.pid)]  # those below the reaper end a little later than it
        reaper.kill()
        await processes.eventually(lambda dying=dying: not any(map(processes.is_alive, dying)))
