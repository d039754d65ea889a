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

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

HERE = Path(__file__).with_name("graders_under_test.py")
SHORT = Limits(wall=1.0, cpu=1.0)
AS_ROOT = os.geteuid() == 0


@pytest.fixture
def graders(closed_later):
    """``graders("echo", workers=1, **options)`` opens graders of that function."""
    return lambda name, workers=1, **options: closed_later(Graders(f"{HERE}:{name}", workers, **options))


@pytest.mark.parametrize("isolation", [None, "process"])
async def test_a_value_comes_back_as_it_was(isolation, graders):
    pool = graders("echo", isolation=isolation)
    nested = {"score": 1.0, "acc": [True, (1, "é")]}
    for value in (None, 0.5, math.inf, nested, "漢", {1, 2}, 10**30, b"x" * 5_000_000, "y" * 5_000_000):
        found = await pool.call({"value": value})
        assert found.verdict == "done", found
        assert type(found.value) is type(value)
        assert found.value == value


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
        (None, {"code": "score = lambda: 1"}, "error", "Can't pickle|PicklingError"),
        (None, {"code": "import time; time.sleep(600)"}, "timeout", "wall limit"),
        (None, {"code": "while True: pass"}, "timeout", "(cpu|wall) limit"),
        (None, {"code": "import os; os._exit(3)"}, "killed", "ended with status 3"),
        ("process", {"code": "score = bytearray(8 << 30)"}, "error", "MemoryError"),
        ("process", {"code": "while True: pass"}, "timeout", "limit"),
        ("process", {"code": "import fractions\nscore = fractions.Fraction(1, 2)"}, "error", "returns numbers, text"),
        ("process", {"code": FORGED}, "error", "plain values, found os.system"),
    ],
)
async def test_what_goes_wrong_has_its_verdict(isolation, kwargs, verdict, reason, graders):
    limits = Limits(wall=5, cpu=1, memory=256 << 20) if isolation else SHORT
    pool = graders("execute", isolation=isolation)
    found = await pool.call(kwargs, limits)
    assert found.verdict == verdict, found
    assert found.value is None
    assert re.search(reason, found.reason), found
    if "sleep" in kwargs.get("code", ""):
        assert found.wall >= 1.0
        assert found.cpu < 1.0
        assert found.waited < found.wall
    assert (await pool.call({"code": "score = 1"})).value == 1, "the next call is not affected"
    assert pool.deaths == 0


async def test_calls_share_nothing_but_the_import(graders):
    pool = graders("execute")
    code = "import builtins\nscore = builtins.calls = getattr(builtins, 'calls', 0) + 1"
    assert [(await pool.call({"code": code})).value for _ in range(3)] == [1, 1, 1]


async def test_all_that_a_call_started_ends_with_it_and_at_once_if_it_is_cancelled(processes, tmp_path, graders):
    pool, ended, cancelled = graders("leave_daemon"), tmp_path / "ended", tmp_path / "cancelled"
    assert (await pool.call({"path": str(ended)})).value == 1.0
    assert not processes.is_alive(int(ended.read_text()))
    task = asyncio.create_task(pool.call({"path": str(cancelled), "seconds": 600.0}))
    daemon = int(await processes.eventually(lambda: cancelled.exists() and cancelled.read_text()))
    workers = processes.workers()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not processes.is_alive(daemon)
    assert processes.workers() == workers


async def test_the_caller_environment_folder_and_output_are_the_graders(monkeypatch, capfd, graders):
    monkeypatch.setenv("RLA_OF_CALLER", "yes")
    found = (await graders("where").call({})).value
    assert (found["cwd"], found["value"], found["uid"]) == (os.getcwd(), "yes", os.getuid())
    await graders("execute").call({"code": "score = 0.0\nprint('said by the grader')"})
    assert "said by the grader" in capfd.readouterr().out


async def test_a_factory_is_called_once_in_the_worker_and_a_module_of_the_callers_path_is_found(
    tmp_path, monkeypatch, graders, closed_later
):
    found = await graders("make", arguments={"factor": 3}).call({"value": 4})
    assert found.value == {"value": 12, "made_in_worker": True}
    (tmp_path / "watch.py").write_text("def score(x): return x + 1\n")
    monkeypatch.syspath_prepend(tmp_path)
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
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        await graders("echo").call({"value": lambda: 1})


async def test_an_import_that_fails_says_where(tmp_path, closed_later):
    path = tmp_path / "broken.py"
    path.write_text("x = 1\nimport nothing_here\n\ndef score(): return 1\n")
    graders = closed_later(Graders(f"{path}:score", 2))
    where = "ModuleNotFoundError: No module named 'nothing_here' .*broken.py, line 2: import nothing_here"
    with pytest.raises(SandboxError, match=where):
        await asyncio.gather(*(graders.call({}) for _ in range(4)))


async def test_a_worker_that_is_killed_is_replaced_once(processes, graders):
    pool = graders("sleep")
    task = asyncio.create_task(pool.call({}, Limits(wall=60)))
    for _ in range(2):
        (worker,) = await processes.executing()
        worker.kill()
        await processes.eventually(lambda worker=worker: worker not in processes.workers())
    found = await task
    assert (found.verdict, found.reason) == ("killed", "two workers died over it")
    assert pool.deaths == 2
    assert (await pool.call({}, SHORT)).verdict == "timeout"


async def test_a_limited_grader_may_execute_what_it_grades(graders):
    pool = graders("execute", isolation="process")
    for code, value in (
        ("import os\nscore = sorted(os.environ)", ["HOME", "LANG", "PATH", "TMPDIR"]),
        ("import os\nscore = (os.listdir('.'), os.getcwd() == os.environ['HOME'])", ([], True)),
        ("print('x' * 10000)\nscore = 1", 1),
        ("import numpy as n\nscore = {'a': n.float32(0.5), 'b': n.arange(2)}", {"a": 0.5, "b": [0, 1]}),
        ("import multiprocessing as m\nscore = m.Pool(2).map(abs, [0, -1])", [0, 1]),
    ):
        found = await pool.call({"code": code}, Limits(wall=60, cpu=60))
        assert (found.verdict, found.value) == ("done", value), code


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
    await asyncio.gather(*(pool.call({"value": number}) for number in range(3)))
    for worker in processes.workers():
        worker.kill()
    await processes.eventually(lambda: not processes.workers())
    assert [(await pool.call({"value": number})).value for number in range(3)] == [0, 1, 2]
    assert pool.deaths == 3
