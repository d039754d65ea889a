"""Graders that raise, hang, spin, print much or start what does not end: each call has its verdict, and the worker stays warm."""

import asyncio
import math
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rl_accel.reward.sandbox import Graders, Limits, SandboxError

pytestmark = pytest.mark.slow

HERE = Path(__file__).with_name("graders_under_test.py")
SHORT = Limits(wall=1.0, cpu=1.0)
AS_ROOT = os.geteuid() == 0


def play(name, work, workers=1, **options):
    """Run ``work(graders)`` and close them."""

    async def main():
        graders = Graders(f"{HERE}:{name}", workers, **options)
        try:
            return await work(graders)
        finally:
            await graders.close()

    return asyncio.run(main())


def call(name, limits=None, isolation=None, **kwargs):
    return play(name, lambda graders: graders.call(kwargs, limits), isolation=isolation)


@pytest.mark.parametrize("isolation", [None, "process"])
@pytest.mark.parametrize("value", [None, 0.5, math.inf, {"score": 1.0, "acc": [True, (1, "é")]}, "漢", {1, 2}, 10**30])
def test_a_value_comes_back_as_it_was(value, isolation):
    found = call("echo", isolation=isolation, value=value)
    assert found.verdict == "done", found
    assert found.value == value
    assert type(found.value) is type(value)


def test_it_is_called_with_keyword_arguments():
    kwargs = {"data_source": "gsm8k", "solution_str": "4", "ground_truth": "4", "extra_info": {"index": 3}}
    assert call("compute_score", **kwargs).value == {"score": 1.0, "acc": True, "extra": {"index": 3}}


@pytest.mark.parametrize("isolation", [None, "process"])
def test_megabytes_come_through_both_ways(isolation):
    assert len(call("large", isolation=isolation, size=5_000_000).value) == 5_000_000
    assert call("echo", isolation=isolation, value="y" * 5_000_000).value == "y" * 5_000_000


@pytest.mark.parametrize(
    ("name", "kwargs", "verdict", "reason"),
    [
        ("fail", {"text": "no such thing"}, "error", "ValueError: no such thing"),
        ("echo", {"values": 1}, "error", "TypeError: .*unexpected keyword argument"),
        ("unpicklable", {}, "error", "Can't pickle|PicklingError"),
        ("sleep", {}, "timeout", "wall limit"),
        ("spin", {}, "timeout", "(cpu|wall) limit"),
        ("leave", {"status": 3}, "killed", "ended with status 3"),
    ],
)
def test_what_goes_wrong_has_its_verdict(name, kwargs, verdict, reason):
    async def work(graders):
        return await graders.call(kwargs, SHORT), await graders.call(kwargs, SHORT)

    for found in play(name, work):
        assert found.verdict == verdict, found
        assert found.value is None
        assert re.search(reason, found.reason), found


def test_a_call_that_is_stopped_says_what_it_took():
    found = call("sleep", SHORT)
    assert found.wall >= 1.0
    assert found.cpu < 1.0
    assert found.waited < found.wall


def test_calls_share_nothing_but_the_import():
    async def work(graders):
        return [(await graders.call({})).value for _ in range(3)]

    assert play("count", work) == [1, 1, 1]


def test_a_daemon_ends_with_its_call(processes, tmp_path):
    path = tmp_path / "pid"
    found = call("leave_daemon", path=str(path))
    assert found.value == 1.0
    assert not processes.is_alive(int(path.read_text()))


def test_a_cancelled_call_stops_all_it_started_and_the_worker_stays(processes, tmp_path):
    path = tmp_path / "pid"

    async def work(graders):
        task = asyncio.create_task(graders.call({"path": str(path)}))
        daemon = int(await processes.eventually(lambda: path.exists() and path.read_text()))
        workers = processes.workers()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return processes.is_alive(daemon), processes.workers() == workers

    assert play("leave_daemon_and_sleep", work) == (False, True)


def test_the_caller_environment_folder_and_output_are_the_graders(monkeypatch, capfd):
    monkeypatch.setenv("RLA_OF_CALLER", "yes")
    found = call("where").value
    assert (found["cwd"], found["value"], found["uid"]) == (os.getcwd(), "yes", os.getuid())
    call("say", text="said by the grader")
    assert "said by the grader" in capfd.readouterr().out


def test_a_module_of_the_callers_path_is_found(tmp_path, monkeypatch):
    (tmp_path / "watch.py").write_text("def score(x): return x + 1\n")
    monkeypatch.syspath_prepend(tmp_path)

    async def main():
        graders = Graders("watch:score", 1)  # a name that one of the worker's own files has
        try:
            return await graders.call({"x": 1})
        finally:
            await graders.close()

    assert asyncio.run(main()).value == 2


def test_a_factory_is_called_once_in_the_worker():
    found = play("make", lambda graders: graders.call({"value": 4}), arguments={"factor": 3})
    assert found.value == {"value": 12, "made_in_worker": True}


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("absent", None, "AttributeError: .*absent"),
        ("NO_FUNCTION", None, "TypeError: .*NO_FUNCTION must be a function, found 7"),
        ("make_number", {}, "must be a function, found 7"),
        ("make", {"facto": 1}, "unexpected keyword argument"),
    ],
)
def test_a_target_that_is_none_is_named(name, arguments, reason):
    with pytest.raises(SandboxError, match=reason):
        play(name, lambda graders: graders.call({}), arguments=arguments)


def test_an_import_that_fails_says_where(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("x = 1\nimport nothing_of_that_name\n\ndef score(): return 1\n")

    async def main():
        graders = Graders(f"{path}:score", 2)
        try:
            await asyncio.gather(*(graders.call({}) for _ in range(4)))
        finally:
            await graders.close()

    where = (
        "ModuleNotFoundError: No module named 'nothing_of_that_name' .*broken.py, line 2: import nothing_of_that_name"
    )
    with pytest.raises(SandboxError, match=where):
        asyncio.run(main())


def test_wrong_targets_and_arguments_are_named():
    with pytest.raises(ValueError, match="target must be 'module:function'"):
        Graders("os.path.join")
    with pytest.raises(ValueError, match="workers must be at least 1, found 0"):
        Graders("os.path:join", 0)
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        play("echo", lambda graders: graders.call({"value": lambda: 1}))


def test_a_worker_that_is_killed_is_replaced_once(processes):
    async def work(graders):
        task = asyncio.create_task(graders.call({}, Limits(wall=60)))
        for _ in range(2):
            (worker,) = await processes.executing()
            worker.kill()
            await processes.eventually(lambda worker=worker: worker not in processes.workers())
        return await task, graders.deaths, (await graders.call({}, SHORT)).verdict

    found, deaths, after = play("sleep", work)
    assert (found.verdict, found.reason) == ("killed", "two workers died over it")
    assert deaths == 2
    assert after == "timeout"


LIMITED = {
    "reads the environment": ("import os\nscore = sorted(os.environ)", ["HOME", "LANG", "PATH", "TMPDIR"]),
    "has a folder of its own": ("import os\nscore = (os.listdir('.'), os.getcwd() == os.environ['HOME'])", ([], True)),
    "prints much": ("print('x' * 10000)\nscore = 1", 1),
    "has numpy's numbers": (
        "import numpy\nscore = {'a': numpy.float32(0.5), 'b': numpy.arange(2)}",
        {"a": 0.5, "b": [0, 1]},
    ),
    "starts processes": ("import multiprocessing as m\nscore = m.Pool(2).map(abs, [0, -1])", [0, 1]),
}


@pytest.mark.parametrize("name", LIMITED)
def test_a_limited_grader_may_execute_what_it_grades(name):
    code, value = LIMITED[name]
    found = call("execute", Limits(wall=60, cpu=60), isolation="process", code=code)
    assert found.verdict == "done", found
    assert found.value == value


def test_an_isolated_grader_reads_what_it_is_shown_and_no_other_file_of_the_users(isolation, tmp_path):
    shown, hidden = tmp_path / "shown", tmp_path / "hidden"
    for path in (shown, hidden):
        path.write_text(path.name)
        path.chmod(0o600)

    async def work(graders):
        return (await graders.call({"paths": [str(shown), str(hidden)]})).value

    options = {"isolation": isolation, "readable": [shown], "arguments": {"path": str(shown)}}
    made_with, of_shown, of_hidden = play("make_reader", work, **options)
    assert made_with == "shown"
    if isolation == "bubblewrap":
        assert (of_shown, of_hidden) == ("shown", "FileNotFoundError")
    elif AS_ROOT:
        assert of_hidden == "PermissionError"


def test_an_isolated_grader_has_an_empty_environment_and_no_network(isolation, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    code = """
import socket
score = [b"s3cret" in open("/proc/self/environ", "rb").read()]
try:
    socket.create_connection(("192.0.2.1", 80), 1)
except OSError as error:
    score.append(str(error))
"""
    if AS_ROOT and isolation == "process":
        code = code.replace(
            'open("/proc/self/environ", "rb").read()', 'b""'
        )  # not even its own, after the change of user
    leaks, network = call("execute", isolation=isolation, code=code).value
    assert not leaks
    if isolation == "bubblewrap" or AS_ROOT:
        assert "unreachable" in network


FORGED = r"""
import os
os.write(200, b'{"verdict": "done", "reason": ""}' + b"\ncos\nsystem\n(Vtouch evil\ntR.")
os._exit(0)
"""
UNBRIDLED = {
    "memory": ("score = bytearray(8 << 30)", "error", "MemoryError"),
    "endless loop": ("while True: pass", "timeout", "limit"),
    "a value of a class": ("import fractions\nscore = fractions.Fraction(1, 2)", "error", "returns numbers, text"),
    "a pickle of its own": (FORGED, "error", "plain values, found os.system"),
}


@pytest.mark.parametrize("name", UNBRIDLED)
def test_a_limited_grader_is_held_to_every_limit(name):
    code, verdict, reason = UNBRIDLED[name]
    found = call("execute", Limits(wall=5, cpu=1, memory=256 << 20), isolation="process", code=code)
    assert re.fullmatch(verdict, found.verdict), found
    assert re.search(reason, found.reason), found


def test_a_script_that_forgets_to_close_ends_all_the_same(processes):
    code = f"""
import asyncio
from rl_accel.reward.sandbox import Graders
async def main():
    graders = Graders("{HERE}:where", 1)
    print((await graders.call({{}})).value["pid"])
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    asyncio.run(processes.eventually(lambda: not processes.is_alive(int(done.stdout))))


def test_workers_that_die_idle_are_replaced_and_no_call_is_blamed(processes):
    """However many there are: a call gives up only after two have died over it."""

    async def work(graders):
        await asyncio.gather(*(graders.call({"value": number}) for number in range(3)))
        for worker in processes.workers():
            worker.kill()
        await processes.eventually(lambda: not processes.workers())
        found = [(await graders.call({"value": number})).value for number in range(3)]
        return found, graders.deaths

    assert play("echo", work, workers=3) == ([0, 1, 2], 3)
