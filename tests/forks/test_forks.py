"""Tests the server of forks: its forks behave like newly started processes, but start sooner."""

import json
import subprocess
import time

import psutil
import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import json, os, random, signal, sys, time, uuid
inherited = sorted(sys.modules.keys() & {"torch", "transformers", "verl", "ray", "rl_accel"})
import numpy, torch

if sys.argv[1] == "wait":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(9))
    print(os.getpid(), flush=True)
    time.sleep(1000)
about = {"words": sys.argv[1:], "name": __name__, "folder": os.getcwd(), "marker": os.environ.get("MARKER")}
about |= {"inherited": inherited, "threads": torch.get_num_threads(), "leads group": os.getpgrp() == os.getpid()}
about["finds"] = __import__("beside").__name__
print(json.dumps([about, [random.random(), numpy.random.random(), uuid.uuid4().hex]]))
sys.exit(7)
"""


def test_forks_are_as_new_processes_and_end_with_their_command(forking, clean_environment, tmp_path, gone):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "beside.py").write_text("")
    added = {"MARKER": "x", "OMP_NUM_THREADS": "2", "PYTHONPATH": str(tmp_path / "path")}
    how = {"cwd": tmp_path, "env": {**clean_environment, **added}, "stdout": subprocess.PIPE, "text": True}
    wanted = {"name": "__main__", "folder": str(tmp_path), "marker": "x", "threads": 2, "leads group": True}
    wanted |= {"inherited": ["torch", "transformers"], "finds": "beside"}
    draws = []
    for words in (["child", "1"], ["child", "2 3"]):
        done = subprocess.run([*forking, str(script), *words], **how)
        assert done.returncode == 7
        about, drawn = json.loads(done.stdout)
        assert about == {**wanted, "words": words}
        draws += drawn
    assert len(set(draws)) == len(draws) == 6

    for sent, code in ((15, 9), (2, -2), (9, -9)):
        with subprocess.Popen([*forking, str(script), "wait"], **how) as command:
            fork = int(command.stdout.readline())
            command.send_signal(sent)
            assert command.wait() == code
            command.stdout.read()  # ends with the fork
            while not gone(fork):  # its files are closed a little before its end
                time.sleep(0.01)
    with subprocess.Popen([*forking, str(script), "wait"], **how) as command:
        psutil.Process(int(command.stdout.readline())).kill()
        assert command.wait() == -9


def test_a_server_that_is_gone_is_replaced_by_python_itself(forks, clean_environment, tmp_path):
    with forks("/bin/true", clean_environment) as words:
        command = [*words]
    (tmp_path / "program.py").write_text("import sys\nprint('torch' in sys.modules)")
    command[0] = psutil.Process().exe()
    done = subprocess.run([*command, str(tmp_path / "program.py")], capture_output=True, text=True)
    assert done.stdout == "False\n"
