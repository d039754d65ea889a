"""Waits for the end of an execution, or for a reason to stop it."""

import os
import select
import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from .channel import Channel
from .tree import cpu_of_ended, descendants, main_waited, reap_orphans, usage

LOOK_SECONDS = 0.02
WAITED_FACTOR = 10.0
"""Waiting for a processor does not count against the wall limit, but no execution lasts longer than the limit times this."""
ALIVE_SECONDS = 1.0
"""So often an execution that is beyond its wall limit, because it waited, tells the trainer that it is still watched."""


@dataclass(frozen=True)
class Bounds:
    """What strikes here: wall and processor seconds, resident bytes and threads (None: any)."""

    wall: float
    cpu: float
    memory: int | None
    processes: int | None


class Sink:
    """What comes out of a pipe, as far as ``most`` bytes and one more; None: any number. Without a pipe nothing comes."""

    def __init__(self, descriptor: int | None, most: int | None) -> None:
        self.descriptor = descriptor
        self.data = bytearray()
        self._most = most
        if descriptor is not None:
            os.set_blocking(descriptor, False)

    @property
    def full(self) -> bool:
        return self._most is not None and len(self.data) > self._most

    def read(self) -> bool:
        """Take what is there now; False at the end."""
        while self.descriptor is not None and not self.full:
            size = 1 << 20 if self._most is None else min(self._most + 1 - len(self.data), 1 << 20)
            try:
                got = os.read(self.descriptor, size)
            except BlockingIOError:
                return True
            if not got:
                return False
            self.data += got
        return not self.full


class Watch:
    """Looks at one execution.

    Args:
        child: its first process.
        began: when, on the monotonic clock.
        bounds: what it may use.
        channel: anything from there stops it, save other limits.
        spared: children that are not of the execution.
        report, output: what it says and prints.
    """

    def __init__(
        self,
        child: int,
        began: float,
        bounds: Bounds,
        channel: Channel,
        spared: Collection[int],
        report: Sink,
        output: Sink,
    ) -> None:
        self.report = report
        self.output = output
        self._waited = 0.0
        self._cpu_before = cpu_of_ended()
        self._child = child
        self._began = began
        self._bounds = bounds
        self._channel = channel
        self._spared = spared
        self._alive_at = began + bounds.wall

    def until_end(self) -> tuple[str, int]:
        """Why it was stopped, or "" if it ended by itself, and then its status. Nothing is killed here.

        Raises:
            Gone: nobody waits for it any more.
        """
        poll = select.poll()
        self._channel.register(poll)
        sinks = [sink for sink in (self.report, self.output) if sink.descriptor is not None]
        for sink in sinks:
            poll.register(sink.descriptor or 0, select.POLLIN)
        ended = os.pidfd_open(self._child)
        poll.register(ended, select.POLLIN)
        look_at = self._began + LOOK_SECONDS
        try:
            while True:
                pause = max(0.0, look_at - time.monotonic())
                ready = {descriptor for descriptor, _ in poll.poll(pause * 1000)}
                while self._channel.interrupted(ready):
                    header, _ = self._channel.next()
                    if "change" not in header:
                        return "cancelled", -1
                    self._bounds = replace(self._bounds, wall=header["wall"], cpu=header["cpu"])
                for sink in [sink for sink in sinks if sink.descriptor in ready]:
                    if not sink.read():
                        sinks.remove(sink)
                        poll.unregister(sink.descriptor or 0)
                if self.output.full or self.report.full:
                    return "output", -1
                if ended in ready:
                    self._waited = max(self._waited, main_waited(self._child))
                    return "", os.waitpid(self._child, 0)[1]
                if time.monotonic() >= look_at:
                    if struck := self._look():
                        return struck, -1
                    look_at = time.monotonic() + LOOK_SECONDS
        finally:
            os.close(ended)

    def waited(self, wall: float, cpu: float) -> float:
        """Seconds it was ready and had no processor, of ``wall`` in which it used ``cpu``.

        Of several threads it is that of the one that waited most, but no more than is left of ``wall`` beside ``cpu``: threads that
        wait for each other's processors use, together, one at least.
        """
        return max(0.0, min(self._waited, wall - cpu))

    def drain(self) -> None:
        """Take what is still in the pipes, when nobody is left who writes to them."""
        self.report.read()
        self.output.read()

    def _look(self) -> str:
        reap_orphans(self._child)
        used = usage(descendants(self._spared))
        self._waited = max(self._waited, used.waited)
        now = time.monotonic()
        wall, cpu = now - self._began, used.cpu + cpu_of_ended() - self._cpu_before
        if wall - self.waited(wall, cpu) > self._bounds.wall or wall > self._bounds.wall * WAITED_FACTOR:
            return "wall"
        if now > self._alive_at:
            self._channel.send({"alive": True})
            self._alive_at = now + ALIVE_SECONDS
        if cpu > self._bounds.cpu:
            return "cpu"
        if self._bounds.memory is not None and used.memory > self._bounds.memory:
            return "memory"
        if self._bounds.processes is not None and used.threads > self._bounds.processes:
            return "processes"
        return ""
