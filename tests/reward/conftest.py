"""Fixtures that look at a sandbox from outside: at its processes and its folders."""

import asyncio
import os
import time

import psutil
import pytest

from rl_accel.reward.sandbox import bubblewrap_problem


class Processes:
    """Processes of the sandboxes and graders that a test has opened."""

    def __init__(self, gone):
        self.is_alive = lambda pid: not gone(pid)
        self._before = {child.pid for child in self._children()}  # an earlier test's may still be ending

    def workers(self):
        """Living supervisors of programs (or bubblewrap), and hosts of graders, that have begun since the test has."""
        return [child for child in self._children() if child.pid not in self._before]

    def _children(self):
        own = (child for child in psutil.process_iter(["ppid", "cmdline"]) if child.info["ppid"] == os.getpid())
        return [child for child in own if "_process.py" in " ".join(child.info["cmdline"] or ())]

    def below(self, pid):
        """Returns the ids of all living descendants of ``pid``, parents before their children."""
        try:
            children = psutil.Process(pid).children()
        except psutil.NoSuchProcess:
            return []
        pids = [child.pid for child in children if self.is_alive(child.pid)]
        return pids + [lower for child in pids for lower in self.below(child)]

    async def executing(self):
        """Waits for supervisors below which a program runs, and returns the pids of the programs.

        A program has another user, or another session, than the supervisor and the first process of its namespace.
        """
        return await self.eventually(
            lambda: [pid for one in self.workers() for pid in self.below(one.pid) if self.is_program(pid)]
        )

    def is_program(self, pid):
        """Whether a process runs in the folder of a program."""
        try:
            return os.readlink(f"/proc/{pid}/cwd").endswith("/run")
        except OSError:
            return False

    async def eventually(self, condition, seconds=60.0):
        """Waits until ``condition()`` is true, and returns its result."""
        last = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < last, "it did not come to pass"
            await asyncio.sleep(0.01)
        return found


@pytest.fixture(params=["process", "bubblewrap"])
def isolation(request):
    if request.param == "bubblewrap" and bubblewrap_problem():
        pytest.skip(f"bubblewrap: {bubblewrap_problem()}")
    return request.param


@pytest.fixture
async def closed_later():
    """``closed_later(Sandbox(1))`` returns the sandbox, or graders, and closes them after the test."""
    opened = []
    yield lambda pool: opened.append(pool) or pool
    for pool in opened:
        await pool.close()


@pytest.fixture
def processes(gone):
    return Processes(gone)
