"""Tests on a real Ray cluster that a step that stands still is reported with what it waits for: a call, and lost processes."""

import re
import shlex
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

JOB = """
import asyncio, logging, os, shlex, signal, subprocess, sys, threading, time
import ray
from rl_accel.features import StallFlags
from rl_accel.integrations.ray import propagate
from rl_accel.integrations.ray import stall
from rl_accel.integrations.ray.stall import Place, Watch

PLACES = {
    "__main__": {
        "Trainer.load": Place(stall.START, step=lambda frame: 0),
        "Trainer.step": Place("gen", step=lambda frame: 3),
        "Grader.score": Place("grader", "{row} (a.limit limits it)"),
    }
}
watch = lambda: Watch(PLACES, StallFlags(patience=2.0))
ray.init(address="local", num_cpus=1, include_dashboard=False, _temp_dir=os.environ["FOLDER"] + "/r")

class Grader:
    def __init__(self):
        self.watch, self.until = watch(), asyncio.Event()
        self.child = subprocess.Popen(["sleep", "600"])
        self.child.send_signal(signal.SIGSTOP)
    async def pid(self):
        return os.getpid()
    async def score(self, row, prompt):
        await self.until.wait()
    async def let_go(self):
        self.child.kill()
        self.until.set()

class Loads(Grader):
    def __init__(self):
        while not os.path.exists(os.environ["FOLDER"] + "/loaded"):
            time.sleep(0.05)

class Stopped(Grader): pass
class Killed(Grader): pass
class Unplaced(Grader): pass

def actor(cls, num_cpus=0):
    return ray.remote(cls).options(num_cpus=num_cpus, runtime_env={"py_executable": os.environ["FORKING"]}).remote()

class Trainer:
    def load(self, is_over):
        while not is_over():
            time.sleep(0.05)
    def step(self, grader):
        ray.get(grader.score.remote("row 5", "a secret prompt"))

lines, alarmed, moves = [], threading.Event(), threading.Event()

class Handler(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
        (moves if "moves again" in lines[-1] else alarmed).set()

logging.getLogger("rl_accel").addHandler(Handler())
stall.LOOK_SECONDS, stall.LEAST_PATIENCE = 0.2, 0.5
loading, questions = Watch(PLACES, StallFlags()), set()
loads = actor(Loads)
Trainer().load(lambda: questions.add(propagate.get(stall.QUESTION)) or len(questions) > 3)
assert not lines, "a slow load of a model is no alarm"
unplaced = actor(Unplaced, num_cpus=5)
Trainer().load(alarmed.is_set)
loading.stop()
open(os.environ["FOLDER"] + "/loaded", "w").close()
assert ray.get(loads.pid.remote())
ray.kill(loads)
print("LOADS", lines.pop(0), flush=True)
lines.clear()
alarmed.clear()
moves.clear()
stall.LOOK_SECONDS = 10.0
graders = [actor(Grader), actor(Stopped), actor(Killed)]
group = ray.util.placement_group([{"CPU": 7}])
pids = ray.get([grader.pid.remote() for grader in graders])
own = watch()
while len(propagate.names("stall/process/")) < 4:
    time.sleep(0.1)
os.kill(pids[1], signal.SIGSTOP)
os.kill(pids[2], signal.SIGKILL)
def let_go():
    alarmed.wait(100)
    command = [sys.executable, "-m", "rl_accel", "stacks"]
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    print(subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200), flush=True)
    os.kill(pids[1], signal.SIGCONT)
    graders[0].let_go.remote()

threading.Thread(target=let_go).start()
Trainer().step(graders[0])
assert moves.wait(100)
print("LINES", *lines, sep="\\n", flush=True)
own.stop()
ray.shutdown()
"""


def test_the_line_names_who_is_waited_for_who_is_stopped_dead_or_unplaced(python, forking, short_tmp):
    done = python(JOB, FOLDER=str(short_tmp), FORKING=shlex.join(forking))
    print(done.stdout, done.stderr[-3000:])
    loads = re.search(r"LOADS (.*)", done.stdout).group(1)
    assert re.match(r"rl-accel: stall: for \d+ s in start of step 0; Ray has not placed Unplaced, which wants", loads)
    lines = done.stdout.split("LINES\n")[1].splitlines()
    alarm = lines[0]
    assert alarm.startswith("rl-accel: stall: for ")
    assert " s in gen of step 3; " in alarm
    assert re.search(r"; no answer from Stopped on \S+ pid \d+; ", alarm)
    assert re.search(r"; Killed on \S+ pid \d+ has died; ", alarm)
    assert "; Ray has not placed Unplaced, which wants {'CPU': 5.0}; " in alarm
    assert "; Ray has not placed a placement group, which wants [{'CPU': 7.0}]; " in alarm
    assert re.search(r"child process \d+ sleep is stopped \(Grader on ", alarm)
    wanted = r"1 wait for grader, the longest for \d+ s in Grader on \S+ pid \d+, row 5 \(a\.limit limits it\)"
    assert re.search(wanted, alarm)
    assert re.search(r"rl-accel: stall: moves again after \d+ s in gen of step 3", done.stdout)
    file = Path(alarm.split("; stacks in ")[1]).read_text()
    assert file.count("in Grader.score") == 1, "stacks once, however often the alarm repeats"
    assert "in Trainer.step" in file
    command = re.search(r"CompletedProcess.*", done.stdout).group()
    assert "row 5" in command
    assert "in Trainer.step" in command
    assert "secret" not in done.stdout + done.stderr + file
