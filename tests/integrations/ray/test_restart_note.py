"""Tests that an actor's note becomes the exit code of its driver, and the file that the launcher reads."""

import json

import pytest

from rl_accel.relaunch import EXIT_CODE, NOTE_VAR

pytestmark = pytest.mark.slow

DRIVER = """
import os
import ray
from rl_accel.integrations.ray import restart_note

restart_note.arm()
restart_note.arm()
ray.init(address=os.environ["CLUSTER"])
"""
ASKING = f"""
{DRIVER}
@ray.remote(num_cpus=0)
class Trainer:
    def ask(self):
        restart_note.publish({{"step": 3, "overrides": ["tp=4"]}})
        restart_note.publish({{"step": 4, "overrides": ["tp=2"]}})

ray.get(Trainer.remote().ask.remote())
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(1)"])
def test_a_note_is_the_exit_code_and_a_file_however_the_driver_ends(python, ray_address, tmp_path, end):
    file = tmp_path / "note.json"
    python(ASKING + end, code=EXIT_CODE, CLUSTER=ray_address, **{NOTE_VAR: str(file)})
    assert json.loads(file.read_text()) == {"step": 4, "overrides": ["tp=2"]}


def test_without_anyone_to_relaunch_it_a_line_says_how(python, ray_address):
    done = python(ASKING, code=EXIT_CODE, CLUSTER=ray_address)
    assert "this run goes on when it is launched again with: tp=2" in done.stderr


@pytest.mark.parametrize(("end", "code"), [("", 0), ("raise SystemExit(5)", 5), ("ray.shutdown()", 0)])
def test_without_a_note_the_exit_code_is_the_drivers_own(python, ray_address, tmp_path, end, code):
    file = tmp_path / "note.json"
    python(DRIVER + end, code=code, CLUSTER=ray_address, **{NOTE_VAR: str(file)})
    assert not file.exists()
