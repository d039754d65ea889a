"""Graders for test_graders.py, good and bad."""

import os
import signal
import time
from pathlib import Path

CALLS = []


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "acc": True, "extra": extra_info}


def echo(value):
    return value


def count():
    CALLS.append(1)
    return len(CALLS)


def fail(text):
    raise ValueError(text)


def unpicklable():
    return lambda: 1


def large(size):
    return b"x" * size


def sleep(seconds=600.0):
    time.sleep(seconds)
    return seconds


def spin(seconds=600.0):
    while time.process_time() < seconds:
        pass
    return seconds


def leave_daemon(path):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(one, signal.SIG_IGN)
            Path(path).write_text(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    os.wait()
    while not (Path(path).exists() and Path(path).read_text()):
        time.sleep(0.01)
    return 1.0


def leave_daemon_and_sleep(path):
    leave_daemon(path)
    time.sleep(600)


def say(text):
    print(text)
    return 0.0


def leave(status):
    os._exit(status)


def where():
    return {"cwd": os.getcwd(), "value": os.environ.get("RLA_OF_CALLER"), "uid": os.getuid(), "pid": os.getppid()}


def execute(code):
    """What a grader does that must be limited."""
    space = {}
    exec(code, space)
    return space["score"]


def make(factor):
    began = os.getpid()

    def times(value):
        return {"value": factor * value, "made_in_worker": began == os.getppid()}

    return times


def make_reader(path):
    text = Path(path).read_text()

    def read(paths):
        texts = [text]
        for other in paths:
            try:
                texts.append(Path(other).read_text())
            except OSError as error:
                texts.append(type(error).__name__)
        return texts

    return read


def make_number():
    return 7


NO_FUNCTION = 7
