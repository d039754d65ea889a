import os
import signal
import time
from pathlib import Path


def echo(value):
    return value


def add_notes(notes, value, texts):
    notes.clear()
    notes["new"] = value
    texts.append("b")
    return value


def execute(code):
    """What a grader does that must be limited."""
    space = {}
    exec(code, space)
    return space["score"]


def sleep(seconds=600.0, path=None):
    if path:
        Path(path, str(os.getpid())).touch()
    time.sleep(seconds)
    return seconds


def leave_daemon(path, seconds=0.0):
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
    time.sleep(seconds)
    return 1.0


def where():
    return {"cwd": os.getcwd(), "value": os.environ.get("RLA_OF_CALLER"), "uid": os.getuid(), "pid": os.getppid()}


def make(factor):
    made = []

    def times(value):
        return {"value": factor * value, "made_before": not made}

    return times


def make_number():
    return 7


NO_FUNCTION = 7
