"""The fork server as the supervisor of a run uses it: its forks are processes like any other, only sooner."""

import json
import sys

import psutil
import pytest

from rl_accel.lab.ab.runner import Stop, ray_temp_dir, supervised

PROGRAM = """
import json, os, random, signal, subprocess, sys, threading
inherited = sorted(sys.modules.keys() & {"torch", "transformers", "verl", "rl_accel"})
import numpy, ray, torch, uuid
from rl_accel.lab.verl_cpu import WORKER_PYTHON

def describe():
    return {
        "words": sys.argv[1:], "name": __name__, "folder": os.getcwd(), "marker": os.environ.get("MARKER"), "inherited": inherited,
        "draws": [random.random(), numpy.random.random(), uuid.uuid4().hex], "threads": torch.get_num_threads(),
        "group": os.getpgrp() == os.getpid(),
    }

class Actor:
    def describe(self):
        import sys
        inherited = sorted(sys.modules.keys() & {"torch", "transformers", "verl"})
        return {"inherited": inherited, "pid": os.getpid(), "parent": os.getppid()}

def child(source, **kwargs):
    return subprocess.Popen([*os.environ[WORKER_PYTHON].split(), source], stdout=subprocess.PIPE, text=True, **kwargs)
"""


def run(source, tmp_path, **env):
    (tmp_path / "program.py").write_text(PROGRAM + source)
    log = tmp_path / "log"
    command = [sys.executable, str(tmp_path / "program.py"), "a", "b c"]
    with ray_temp_dir() as temp:
        variables = {"VERL_PLATFORM": "cpu", "MARKER": "x", "RAY_TMPDIR": str(temp), **env}
        outcome = supervised(command, variables, tmp_path, log, Stop(), lambda: False, temp)
    return outcome.exit_code, log.read_text()


def test_a_program_and_its_children_find_the_libraries_imported_and_all_else_as_in_a_new_process(tmp_path):
    code, log = run(
        """
print(json.dumps(describe()), flush=True)
if len(sys.argv) > 1:
    first, second = child(__file__), child(__file__)
    print(first.communicate()[0] + second.communicate()[0], end="", flush=True)
sys.exit(7)
""",
        tmp_path,
        OMP_NUM_THREADS="2",
    )
    seen = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert code == 7
    assert [process["words"] for process in seen] == [["a", "b c"], [], []]
    draws = [draw for process in seen for draw in process.pop("draws")]
    same = {"folder": str(tmp_path), "marker": "x", "inherited": ["torch", "transformers"], "threads": 2, "group": True}
    assert [process | {"words": None} for process in seen] == [{"words": None, "name": "__main__", **same}] * 3
    assert len(set(draws)) == len(draws) == 9


def test_the_end_of_a_fork_and_of_its_command_are_the_same_event(tmp_path):
    code, log = run(
        """
sleep = "import os, signal, time; signal.signal(15, lambda *_: os._exit(9)); print(os.getpid(), flush=True); time.sleep(1000)"
open("sleep.py", "w").write(sleep)
for sent in (15, 2, 9):
    process = child("sleep.py")
    pid = int(process.stdout.readline())
    process.send_signal(sent)
    process.wait()
    process.stdout.read()  # ends when the fork has ended
    print("command", sent, process.returncode, flush=True)
process = child("sleep.py")
os.kill(int(process.stdout.readline()), 9)
print("fork", process.wait())
child("sleep.py")  # left behind
""",
        tmp_path,
    )
    assert code == 0
    lines = [line for line in log.splitlines() if line.startswith(("command", "fork"))]
    assert lines == ["command 15 9", "command 2 -2", "command 9 -9", "fork -9"]
    assert "ended what the run left behind" in log
    assert not [process for process in psutil.process_iter() if str(tmp_path) in " ".join(process.cmdline())]


def test_ray_starts_its_workers_as_forks_and_restarts_them(tmp_path):
    code, log = run(
        """
ray.init(num_cpus=2, include_dashboard=False, runtime_env={"py_executable": os.environ[WORKER_PYTHON]})
actor = ray.remote(Actor).options(max_restarts=1, max_task_retries=-1).remote()
first = ray.get(actor.describe.remote())
os.kill(first["pid"], signal.SIGKILL)
print(json.dumps([first, ray.get(actor.describe.remote())]))
""",
        tmp_path,
    )
    assert code == 0, log
    first, second = next(json.loads(line) for line in log.splitlines() if line.startswith("[{"))
    assert first["inherited"] == second["inherited"] == ["torch", "transformers"]
    assert first["pid"] != second["pid"]
    assert first["parent"] == second["parent"]


@pytest.mark.parametrize(
    ("name", "value"), [("RL_ACCEL_FORK_SERVER", "0"), ("VERL_PLATFORM", "cuda"), ("RAY_ADDRESS", "auto")]
)
def test_other_runs_start_python_itself(name, value, tmp_path):
    code, log = run("print('inherited', inherited, os.environ.get(WORKER_PYTHON))", tmp_path, **{name: value})
    assert (code, log.strip()) == (0, "inherited [] None")
