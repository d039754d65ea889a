"""Runs untrusted Python where it cannot stall, fill or outlive the trainer."""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl_accel.reward.program import Case, CaseResult, Limits

logger = logging.getLogger("rl_accel")

_ZYGOTE = Path(__file__).with_name("zygote.py")
_START_SECONDS = 30.0
_GRACE_SECONDS = 10.0
"""A worker that has not answered so long after the wall limit is killed itself, with all that descends from it."""
_MESSAGE_BYTES = 64 << 20


class SandboxError(RuntimeError):
    """A worker could not be started."""


class Sandbox:
    """A pool of warm workers, each of which runs one program at a time in a process of its own that it forks for it.

    Use it from one event loop. ``isolation`` is "process" (process group, limits, empty environment, private folder; as root also a
    user and a network of its own) or "bubblewrap" (all that, of the file system only the interpreter and the system's programs,
    read-only, a private /tmp, and processes and a network of its own). Without root, "process" does not keep a program from this
    user's files, network and other processes: it could send them signals.

    Args:
        workers: programs run at once; the others wait in order. None: the cores this process may use.
        isolation: None takes bubblewrap where it works.
        preload: modules that workers import when they start, so that programs get them for nothing (``("numpy",)``).

    Raises:
        SandboxError: bubblewrap was asked for and does not work here.
    """

    def __init__(self, workers: int | None = None, isolation: str | None = None, preload: Sequence[str] = ()) -> None:
        self._size = len(os.sched_getaffinity(0)) if workers is None else workers
        if self._size < 1:
            raise ValueError(f"workers must be at least 1, found {workers!r}")
        missing = bubblewrap_problem() if isolation in (None, "bubblewrap") else ""
        if isolation == "bubblewrap" and missing:
            raise SandboxError(f"bubblewrap does not work here: {missing}")
        self.isolation = "process" if isolation == "process" or missing else "bubblewrap"
        self._preload = tuple(preload)
        self._idle: deque[_Worker] = deque()
        self._slots = list(range(self._size))
        self._free = asyncio.Semaphore(self._size)
        self._closed = False

    async def run(self, code: str, case: Case, limits: Limits | None = None) -> CaseResult:
        """Run ``code`` on ``case``. Cancelling this call stops the program at once.

        A worker that dies is replaced and the program run again; if that one dies too, the program is held to have killed it.

        Raises:
            SandboxError: no worker can be started.
        """
        order = {"code": code, "case": asdict(case), "limits": asdict(limits or Limits())}
        async with self._free:
            for attempt in (1, 2):
                worker = self._idle.popleft() if self._idle else await self._start()
                try:
                    answer = await worker.run(order)
                except (ConnectionError, asyncio.IncompleteReadError, asyncio.TimeoutError) as error:
                    await self._bury(worker)
                    logger.warning(
                        "rl-accel: a sandbox worker died (%r)%s", error, ", trying again" if attempt == 1 else ""
                    )
                    continue
                except BaseException:
                    await self._bury(worker)
                    raise
                self._idle.append(worker)
                return _result(answer, case)
        return CaseResult("killed", reason="two workers died over it")

    async def close(self) -> None:
        """End all workers. Programs that are running are stopped."""
        self._closed = True
        while self._idle:
            await self._bury(self._idle.popleft())

    async def _start(self) -> "_Worker":
        if self._closed:
            raise SandboxError("the sandbox is closed")
        slot = self._slots.pop()
        try:
            return await _Worker.start(slot, self.isolation, self._preload)
        except BaseException:
            self._slots.append(slot)
            raise

    async def _bury(self, worker: "_Worker") -> None:
        await worker.kill()
        self._slots.append(worker.slot)


class _Worker:
    """A zygote process and our end of its socket."""

    def __init__(self, process: "subprocess.Popen[bytes]", slot: int) -> None:
        self.process = process
        self.slot = slot
        self.network = "shared"
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._count = 0

    @classmethod
    async def start(cls, slot: int, isolation: str, preload: Sequence[str]) -> "_Worker":
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-I", str(_ZYGOTE), str(theirs.fileno()), str(slot), *preload]
            process = subprocess.Popen(
                [*(_bubblewrap() if isolation == "bubblewrap" else []), *command],
                pass_fds=[theirs.fileno()],
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        worker = cls(process, slot)
        worker._reader, worker._writer = await asyncio.open_connection(sock=ours, limit=_MESSAGE_BYTES)
        try:
            ready = json.loads(await asyncio.wait_for(worker._reader.readuntil(b"\n"), _START_SECONDS))
            if ready["problem"]:
                raise SandboxError(ready["problem"])
        except (asyncio.IncompleteReadError, asyncio.TimeoutError) as error:
            await worker.kill()
            raise SandboxError("a sandbox worker did not start") from error
        except BaseException:
            await worker.kill()
            raise
        worker.network = ready["network"]
        return worker

    async def run(self, order: dict[str, Any]) -> dict[str, Any]:
        self._count += 1
        self._writer.write(json.dumps({"run": self._count, **order}).encode() + b"\n")
        await self._writer.drain()
        line = await asyncio.wait_for(self._reader.readuntil(b"\n"), order["limits"]["wall"] + _GRACE_SECONDS)
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def kill(self) -> None:
        """Have the worker stop what it runs and end; a worker that does not is killed, and the kernel its children with it."""
        self._writer.close()
        try:
            await asyncio.wait_for(asyncio.to_thread(self.process.wait), 5.0)
        except asyncio.TimeoutError:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


def _result(answer: dict[str, Any], case: Case) -> CaseResult:
    measured = {"wall": answer["wall"], "cpu": answer["cpu"], "output": answer["output"]}
    stopped = answer["stopped"]
    if stopped in ("wall", "cpu"):
        return CaseResult("timeout", reason=f"{stopped} limit", **measured)
    if stopped == "memory":
        return CaseResult("memory", reason="resident memory", **measured)
    if stopped:
        return CaseResult("killed", reason=f"{stopped} limit" if stopped == "output" else stopped, **measured)
    try:
        report = json.loads(answer["report"])
        verdict, reason = report["verdict"], str(report["reason"])
    except (ValueError, KeyError, TypeError):
        return CaseResult("error", reason=_ending(answer["status"]), **measured)
    if verdict == "passed" and case.kind == "stdin" and _lines(answer["printed"]) != _lines(case.expected):
        return CaseResult("wrong", reason="other output", **measured)
    if verdict not in ("passed", "wrong", "error", "memory"):
        return CaseResult("error", reason="the program wrote a report of its own", **measured)
    return CaseResult(verdict, reason=reason, **measured)


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"ended by signal {os.WTERMSIG(status)}"
    return f"ended with status {os.WEXITSTATUS(status)} before its case was judged"


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.rstrip().splitlines()]
    return lines


def bubblewrap_problem() -> str:
    """Say why bubblewrap cannot be used here; "" if it can."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed"
    done = subprocess.run([*_bubblewrap(), "true"], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr.strip()[:200]


def _bubblewrap() -> list[str]:
    """The command that runs a worker where it sees the interpreter, its packages and the system's programs, and nothing else."""
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    shown = ["/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"]
    shown += [sys.base_prefix, sys.prefix, *packages, str(_ZYGOTE)]
    return [
        "bwrap",
        *("--dev", "/dev", "--proc", "/proc", "--tmpfs", "/dev/shm", "--tmpfs", "/tmp", "--tmpfs", "/var/tmp"),
        *(word for path in shown for word in ("--ro-bind-try", path, path)),  # last: an interpreter may lie below /tmp
        *("--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000"),
        *("--die-with-parent", "--new-session", "--"),
    ]
