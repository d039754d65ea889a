"""The loop of a worker: one order, one fork, one answer, and nothing left."""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .channel import Channel, Header
from .child import Child
from .cleanup import UserFiles, remove
from .identity import Identity
from .tree import cpu_of_ended, descendants, kill_all
from .watch import Bounds, Sink, Watch

OUTPUT_KEPT = 10_000
VERDICT_BYTES = 1 << 16
"""A report of a program, which is a verdict and a few words. What a grader returns may be as large as its memory."""


@dataclass(frozen=True)
class Server:
    """Serves orders.

    Args:
        channel: where they come from.
        setup: the first message.
        identity: the user that limited executions run as.
        function: the grader; None if programs are served.
        outer: processes that the user of programs has where this one cannot see them.
    """

    channel: Channel
    setup: Header
    identity: Identity | None
    function: Callable[..., Any] | None
    outer: int

    def serve(self) -> None:
        """Answer orders, one at a time, until there is nobody to ask.

        Raises:
            Gone: the channel is closed.
        """
        spared = frozenset(descendants())  # what the target started when it was imported
        user_files = UserFiles(self.identity.uid) if self.identity else None
        while True:
            order, payload = self.channel.next()
            if "run" not in order:
                continue  # a wish to stop what has ended meanwhile
            if order.get("case", {}).get("kind") == "pytest":
                with contextlib.suppress(ImportError):
                    __import__("pytest")  # here, so that the next ones need not
            self._run(order, payload, spared)
            if user_files:
                user_files.remove()

    def _run(self, order: Header, payload: bytes, spared: frozenset[int]) -> None:
        """Execute an order and answer it when its last process has gone. Its folder goes after that: it may hold much."""
        limited, limits = self.setup["limited"], order["limits"]
        before = cpu_of_ended()
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(self._folder()) if limited else None
            report, to_report = _pipe(stack)
            out, to_out = _pipe(stack) if limited else (None, None)
            stack.callback(kill_all, spared)  # before its pipes are closed and its folder is removed
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()  # or the fork would print it a second time
            began = time.monotonic()
            child = os.fork()
            if child == 0:
                streams = to_out, to_report
                Child(order, payload, folder, *streams, self.identity, self.channel, self.function, self.outer).run()
            for descriptor in (to_report, to_out):
                if descriptor is not None:
                    os.close(descriptor)
            some = (limits["memory"], limits["processes"]) if limited else (None, None)
            bounds = Bounds(limits["wall"], limits["cpu"], *some)
            most = VERDICT_BYTES if self.function is None else limits["memory"] if limited else None
            sinks = Sink(report, most), Sink(out, limits["output_bytes"])
            watch = Watch(child, began, bounds, self.channel, spared, *sinks)
            stopped, status = watch.until_end()
            wall = time.monotonic() - began
            kill_all(spared)
            cpu = cpu_of_ended() - before
            if not stopped and os.WIFSIGNALED(status) and cpu > limits["cpu"]:
                stopped = "cpu"  # the kernel's own limit struck before this watch, which had no processor, could look
            watch.drain()
            printed = bytes(watch.output.data)
            judged = order.get("case", {}).get("kind") == "stdin" and not stopped
            answer = {
                "id": order["run"],
                "stopped": stopped,
                "status": status,
                "output": printed[:OUTPUT_KEPT].decode(errors="replace"),
                "printed": printed.decode(errors="replace") if judged else "",
                "wall": wall,
                "cpu": cpu,
                "waited": watch.waited(wall, cpu),
            }
            self.channel.send(answer, bytes(watch.report.data))

    @contextlib.contextmanager
    def _folder(self) -> Any:
        """An empty folder of the program's own."""
        folder = os.path.join(self.setup["folder"], "run")
        os.mkdir(folder, 0o700)
        try:
            if self.identity:
                os.chown(folder, self.identity.uid, self.identity.uid)
            yield folder
        finally:
            remove(folder)


def _pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe whose reading end the stack closes; the writing end is ours and the fork's to close."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    stack.callback(os.close, reading)
    return reading, writing
