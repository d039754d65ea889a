"""Warm workers of one kind, shared by calls that wait for them in order."""

import asyncio
import itertools
import logging
import os
from collections import deque
from dataclasses import replace

from rl_accel.reward.base_folder import BaseFolder
from rl_accel.reward.limit_updates import LimitUpdates
from rl_accel.reward.worker_process import LOST, Answer, Header, SandboxError, Setup, WorkerProcess

logger = logging.getLogger("rl_accel")


class Pool:
    """At most ``workers`` workers, each started when it is first needed. Use it from one event loop.

    Args:
        workers: None: the cores this process may use.
        setup: how they are started. Where ``setup.message`` asks for limits, each is given a folder of its own.

    Attributes:
        deaths: how many workers have died of themselves.

    Raises:
        ValueError: fewer than one worker.
    """

    def __init__(self, workers: int | None, setup: Setup) -> None:
        self.size = len(os.sched_getaffinity(0)) if workers is None else workers
        if self.size < 1:
            raise ValueError(f"workers must be at least 1, found {workers!r}")
        self.idle: deque[WorkerProcess] = deque()
        self.deaths = 0
        self._setup = setup
        self._busy: set[WorkerProcess] = set()
        self._free = asyncio.Semaphore(self.size)
        self._folder: BaseFolder | None = None
        self._numbers = itertools.count()
        self._closed = False
        self._warned = False

    async def run(
        self, order: Header, payload: bytes, wall: float, updates: LimitUpdates | None = None
    ) -> Answer | None:
        """Run an order on the next free worker; None if two workers died over it. Cancelling this stops it at once.

        ``updates`` changes its limits while it runs.

        Raises:
            SandboxError: no worker can be started, or the pool is closed.
        """
        async with self._free:
            for attempt in (1, 2):
                worker = await self._take()
                try:
                    answer = await worker.run(order, payload, wall, updates)
                except LOST as error:
                    self.deaths += 1
                    await self._bury(worker)
                    again = ", trying again" if attempt == 1 and not self._closed else ""
                    logger.warning("rl-accel: a sandbox worker died (%r)%s", error, again)
                except asyncio.CancelledError:
                    await asyncio.shield(asyncio.ensure_future(self._settle(worker)))
                    raise
                else:
                    self._busy.discard(worker)
                    self.idle.append(worker)
                    return answer
        return None

    async def close(self) -> None:
        """End all workers. What runs is stopped, and its callers get a SandboxError."""
        self._closed = True
        await asyncio.gather(*(self._bury(worker) for worker in self._busy))
        for _ in range(self.size):  # until all callers have left
            await self._free.acquire()
        for _ in range(self.size):
            self._free.release()
        await asyncio.gather(*(self._bury(worker) for worker in self.idle))
        self.idle.clear()
        if self._folder is not None:
            self._folder.remove()

    async def _settle(self, worker: WorkerProcess) -> None:
        """Have a worker whose caller has gone stop, and keep it if it does: to start it again may take long."""
        try:
            await worker.stop()
        except BaseException as error:
            await self._bury(worker)
            if not isinstance(error, LOST):
                raise
        else:
            self._busy.discard(worker)
            self.idle.append(worker)

    async def _take(self) -> WorkerProcess:
        """An idle worker, or a new one."""
        if self._closed:
            raise SandboxError("the sandbox is closed")
        while self.idle and self.idle[0].gone:  # it died while it had nothing to do: no order is to blame
            self.deaths += 1
            await self._bury(self.idle.popleft())
        worker = self.idle.popleft() if self.idle else await WorkerProcess.spawn(self._setup_of_one())
        self._busy.add(worker)
        if worker.shared is None:
            try:
                await worker.ready(self._setup.seconds)
            except BaseException:
                await self._bury(worker)
                raise
            if worker.shared and self._setup.message["limited"] and not self._warned:
                self._warned = True
                logger.warning("rl-accel: untrusted programs share this machine's %s", " and ".join(worker.shared))
        return worker

    def _setup_of_one(self) -> Setup:
        setup = self._setup
        if "folder" not in setup.message:
            if self._folder is None:
                self._folder = BaseFolder()
            folder = os.path.join(self._folder.path, str(next(self._numbers)))
            setup = replace(setup, message={**setup.message, "folder": folder})
        return setup

    async def _bury(self, worker: WorkerProcess) -> None:
        worker.hang_up()  # even if this is cancelled
        try:
            await worker.kill()
        finally:
            self._busy.discard(worker)
