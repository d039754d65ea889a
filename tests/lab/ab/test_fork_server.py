"""Tests the fork server: its forks behave like newly started processes, but start sooner."""

import json
import sys

import psutil
import pytest

from rl_accel.lab.ab.fork_server import LIBRARIES
from rl_accel.lab.ab.runner import Stop, ray_temp_dir, supervised

pytestmark = pytest.mark.slow

PROGRAM = """
import json, os, random, signal, subprocess, sys, time, uuid
inherited = sorted(sys.modules.keys() & {"torch", "transformers", "verl", "ray", "rl_accel"})
import numpy, torch
python = os.environ.get("RL_ACCEL_WORKER_PYTHON", sys.executable).split()

def tell(name, *found):
    print(json.dumps([name, *found]), flush=True)

def start(*words):
    return subprocess.Popen([*python, __file__, *words], stdout=subprocess.PIPE, text=True)

def wait():
    signal.signal(signal.SIGTERM, lambda *_: os._exit(9))
    print(os.getpid(), flush=True)
    time.sleep(1000)

if sys.argv[1] == "wait":
    wait()
about = {"words": sys.argv[1:], "name": __name__, "folder": os.getcwd(), "marker": os.environ.get("MARKER")}
about |= {"inherited": inherited, "threads": torch.get_num_threads(), "leads group": os.getpgrp() == os.getpid()}
tell("process", about, [random.random(), numpy.random.random(), uuid.uuid4().hex])
if sys.argv[1] != "driver":
    sys.exit(0)
"""
CHILDREN = """
for process in [start("child", "1"), start("child", "2 3")]:
    print(process.communicate()[0], end="", flush=True)
for sent in (15, 2, 9):
    process = start("wait")
    process.stdout.readline()
    process.send_signal(sent)
    process.wait()
    process.stdout.read()  # ends with the fork
    tell("command", sent, process.returncode)
process = start("wait")
os.kill(int(process.stdout.readline()), 9)
tell("fork", 9, process.wait())
start("wait").stdout.readline()  # left behind

import ray

class Actor:
    def process(self):
        return os.getpid(), os.getppid(), sorted(sys.modules.keys() & {"torch", "transformers", "verl"})

ray.init(num_cpus=1, include_dashboard=False, runtime_env={"py_executable": " ".join(python)})
actor = ray.remote(Actor).options(max_restarts=1, max_task_retries=-1).remote()
first = ray.get(actor.process.remote())
os.kill(first[0], signal.SIGKILL)
tell("ray", first, ray.get(actor.process.remote()))
sys.exit(7)
"""


def run(source, folder, **env):
    """Runs a program as a run of the CPU platform. Returns its exit code and the lists that it told, by their names."""
    (folder / "program.py").write_text(source)
    command, log = [sys.executable, str(folder / "program.py"), "driver"], folder / "log"
    with ray_temp_dir() as temp:
        variables = {"VERL_PLATFORM": "cpu", "MARKER": "x", "OMP_NUM_THREADS": "2", "RAY_TMPDIR": str(temp), **env}
        outcome = supervised(command, variables, folder, log, Stop(), lambda: False, temp)
    told = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('["')]
    return outcome.exit_code, {name: [found for key, *found in told if key == name] for name, *_ in told}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("forks")


@pytest.fixture(scope="module")
def told(folder):
    code, told = run(PROGRAM + CHILDREN, folder)
    assert code == 7
    return told


def test_a_program_and_its_children_find_the_libraries_imported_and_all_else_as_in_a_new_process(told, folder):
    results = [about for about, _ in told["process"]]
    same = {"name": "__main__", "folder": str(folder), "marker": "x", "threads": 2, "leads group": True}
    words = (["driver"], ["child", "1"], ["child", "2 3"])
    assert results == [same | {"words": item, "inherited": ["torch", "transformers"]} for item in words]
    draws = [draw for _, draws in told["process"] for draw in draws]
    assert len(set(draws)) == len(draws) == 9


def test_a_command_and_its_fork_end_together_in_the_same_way(told, folder):
    assert told["command"] == [[15, 9], [2, -2], [9, -9]]
    assert told["fork"] == [[9, -9]]
    names = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert not [name for name in names if str(folder) in name]


def test_ray_starts_its_workers_as_forks_and_restarts_them(told):
    (((first, server, names), (second, again, _)),) = told["ray"]
    assert names == ["torch", "transformers"]
    assert first != second
    assert server == again


@pytest.mark.parametrize("given", ["RL_ACCEL_FORK_SERVER=0", "VERL_PLATFORM=cuda", "RAY_ADDRESS=auto"])
def test_other_runs_start_python_itself(given, tmp_path):
    code, told = run(PROGRAM, tmp_path, **dict([given.split("=")]))
    assert code == 0
    assert told["process"][0][0]["inherited"] == []


def test_a_server_in_which_a_library_started_a_thread_does_not_fork(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, threading\n"
        "if any(word.endswith('fork_server.py') for word in sys.orig_argv):\n"
        f"    sys.modules |= dict.fromkeys({LIBRARIES})  # cannot be imported\n"
        "    threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    code, told = run(PROGRAM, tmp_path, PYTHONPATH=str(tmp_path))
    assert code == 0
    assert told["process"][0][0]["inherited"] == []
    assert "without a fork server, because it has 2 threads" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(("words", "code"), [(["no-such-program"], 127), ([sys.executable, "-c", "exit(5)"], 5)])
def test_a_command_that_is_no_program_of_python_runs_as_it_is(words, code, tmp_path):
    with ray_temp_dir() as temp:
        outcome = supervised(words, {"VERL_PLATFORM": "cpu"}, tmp_path, tmp_path / "log", Stop(), lambda: False, temp)
    assert outcome.exit_code == code, (tmp_path / "log").read_text()
