"""Tests that a run of verl that stands still is named in one line, that it goes on when it is let go, and that it ends itself."""

import contextlib
import re
import signal
from typing import NamedTuple

import psutil
import pytest

pytestmark = pytest.mark.full

LAST_TRY = 6
"""Number of alarms about a step after which the run goes on although none says what is wanted."""
ADDRESS = r"\S+ pid \d+"


class Way(NamedTuple):
    """What stands still, in which step, by which signal if any, and what a line says about it."""

    what: str
    step: int
    signal: signal.Signals | None
    pattern: str


def processes_of(part, metrics):
    """Returns the processes of the run that logs to ``metrics`` whose title contains ``part``."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            ours = process.environ().get("VERL_FILE_LOGGER_PATH") == str(metrics)
            if ours and part in process.cmdline()[0]:
                found.append(process)
    return found


class Follower:
    """Lets the run go on when the line about the present way is there, and brings about the next way."""

    def __init__(self, folder, read_metrics, ways):
        self.folder = folder
        self.read_metrics = read_metrics
        self.ways = list(ways)
        self.lines = {}
        self.texts = {}
        self.signalled = None

    def __call__(self, metrics):
        log = self.folder / "train.log"
        if not self.ways or not log.exists():
            return
        way = self.ways[0]
        if way.signal and self.signalled is None and len(self.read_metrics(metrics)) == way.step - 1:
            self.signal(way, metrics)
        alarms = re.findall(rf"stall: for .* of step {way.step}\b.*", log.read_text(errors="replace"))
        if way.signal and self.signalled is None:
            return
        said = [line for line in alarms if re.search(way.pattern, line)]
        if said:
            self.lines[way.what] = said[0]
            with open(said[0].split("; stacks in ")[1].strip()) as file:
                self.texts[way.what] = file.read()
        if said or len(alarms) >= LAST_TRY:
            (self.folder / way.what).touch()
            if way.signal is signal.SIGSTOP:
                self.signalled.send_signal(signal.SIGCONT)
            self.signalled = None
            self.ways.pop(0)

    def signal(self, way, metrics):
        found = processes_of(way.what, metrics)
        if found:
            self.signalled = found[-1]
            self.signalled.send_signal(way.signal)


@pytest.mark.vllm
@pytest.mark.parametrize("engine", ["vllm"], indirect=True, scope="module")
def test_a_stopped_engine_of_vllm_is_named_and_so_are_the_replicas_that_are_waited_for(launch, tmp_path, read_metrics):
    pattern = (
        rf"child process \d+ VLLM::EngineCore is stopped \(vLLM\w+ on {ADDRESS}\); .*for generation, .* replica \S+"
    )
    way = Way("VLLM::EngineCore", 2, signal.SIGSTOP, pattern)
    follow = Follower(tmp_path, read_metrics, [way])
    patience = ["+rl_accel.stall.enable=True", "+rl_accel.stall.patience=6"]
    run = launch(tmp_path, 2, (4, 2), "data.max_response_length=64", *patience, follow=follow)
    assert way.what in follow.lines
    print(follow.lines[way.what])
    assert re.search(r"stall: moves again after \d+ s in .* of step 2\b", run.log)
