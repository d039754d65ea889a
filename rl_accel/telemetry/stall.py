"""Recognises stages and waits by the functions on the stacks of a process, and decides that a stage takes too long.

Nothing is measured or wrapped: another thread reads the stacks, so that a blocked event loop is seen like any other code.
"""

import asyncio
import gc
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import FrameType
from typing import Any, Literal, NamedTuple

LEAST_PATIENCE = 600.0
"""Seconds that every stage may take by default. First compilations and loads of large models take minutes."""
TIMES_MEDIAN = 5.0
"""Default patience as a multiple of the median duration of the stage. Steps of a healthy run vary by four times."""
LONGEST_LIST = 6
"""Number of processes without an answer that a summary names."""


def text_of(template: str) -> Callable[[FrameType], str]:
    """Returns a function that fills ``template`` with the local variables of a frame."""
    return lambda frame: template.format_map(frame.f_locals)


@dataclass(frozen=True)
class Place:
    """A function in which a framework works or waits.

    Attributes:
        what: stage of a training step, such as "update_actor", or kind of a wait, such as "grader".
        detail: function that returns details from the function's frame, such as the id of a request.
        step: function that returns the number of the training step from the frame. None: the place is a wait and not a stage.
        flag: flag of rl-accel that limits such a wait; "" for none.
    """

    what: str
    detail: Callable[[FrameType], str] = lambda _frame: ""
    step: Callable[[FrameType], int] | None = None
    flag: str = ""


Places = Mapping[str, Mapping[str, Place]]
"""Mapping from module to its places by function, as "function" or "Class.method"; "*" stands for all others."""


class Seen(NamedTuple):
    """A place that was found on a stack. ``identity`` stays equal while the same call of the function runs."""

    place: Place
    detail: str
    step: int
    identity: tuple[Any, ...]


class Wait(NamedTuple):
    """A wait of one thread or asyncio task. ``since`` is the time of the look that first saw it."""

    what: str
    detail: str
    since: float
    flag: str


class Report(NamedTuple):
    """State of one process, as text and as ``waits``. ``question`` is the time of the question that the report answers.

    ``problems`` are sentences for the log line, such as that a child process is stopped.
    """

    process: str
    question: float
    waits: list[Wait]
    problems: list[str]
    text: str
    stacks: str


def live_stacks() -> list[tuple[str, list[FrameType]]]:
    """Returns name and frames, outermost first, of each thread but the caller's and of each suspended asyncio task."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found: list[tuple[str, list[FrameType]]] = []
    for ident, frame in sys._current_frames().items():
        frames: list[FrameType] = []
        innermost: FrameType | None = frame
        while innermost is not None:
            frames.insert(0, innermost)
            innermost = innermost.f_back
        if ident != threading.get_ident():
            found.append((f"thread {names.get(ident, ident)}", frames))
    tasks: Any = getattr(asyncio.tasks, "_scheduled_tasks", None)  # the name since Python 3.12
    for task in list(tasks or vars(asyncio.tasks).get("_all_tasks", ())):
        coroutine: Any = task.get_coro()
        if getattr(coroutine, "cr_running", False):
            continue  # it is on the stack of its thread
        frames = []
        while hasattr(coroutine, "cr_await"):
            if coroutine.cr_frame is not None:
                frames.append(coroutine.cr_frame)
            coroutine = coroutine.cr_await
            if (
                type(coroutine).__name__ == "coroutine_wrapper"
            ):  # of what Ray's compiled coroutines await; it has no attributes
                (coroutine,) = gc.get_referents(coroutine)
        if frames:
            found.append((f"task {task.get_name()}", frames))
    return found


def find_places(frames: Sequence[FrameType], places: Places) -> list[Seen]:
    """Returns those of ``places`` that are on a stack, in the order of ``frames``."""
    found = []
    for frame in frames:
        of_module = places.get(frame.f_globals.get("__name__", ""))
        if of_module is None:
            continue
        place = of_module.get(frame.f_code.co_qualname) or of_module.get("*")
        if place is None:
            continue
        step = 0
        detail = ""
        try:
            if place.step is not None:
                step = place.step(frame)
            detail = place.detail(frame)
        except Exception:  # a local variable is not bound yet, or changes at this moment
            pass
        found.append(Seen(place, detail, step, (place.what, id(frame), step)))
    return found


def stack_text() -> str:
    """Returns the stacks as text; equal ones once. Values of variables are left out, because they may be secret."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, frames in live_stacks():
        lines = [f"    {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}" for frame in frames]
        names["\n".join(lines)].append(name)
    return "\n".join(f"  {', '.join(group[:3])} ({len(group)})\n{lines}" for lines, group in names.items())


class Patience:
    """Decides whether the present stage takes too long.

    ``seconds`` limits every stage. None: the limit is the larger of :data:`LEAST_PATIENCE` and :data:`TIMES_MEDIAN` times the
    median duration of the stage so far.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._durations: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=100))
        self.stage: Seen | None = None
        self.since = 0.0  # time of the look that first saw this stage
        self.alarms = 0  # about this stage

    def limit(self) -> float:
        """Returns the seconds before the first alarm about the present stage, and from each alarm to the next."""
        if self._seconds is not None:
            return self._seconds
        known = self._durations[self.stage.place.what] if self.stage else ()
        return max(LEAST_PATIENCE, TIMES_MEDIAN * median(known)) if known else LEAST_PATIENCE

    def look(self, stage: Seen | None, now: float) -> Literal["alarm", "moves again", ""]:
        """Takes the stage at the time ``now``. Returns "moves again" if the stage before had an alarm and has ended."""
        if self.stage is None or stage is None or stage.identity != self.stage.identity:
            had_alarm = self.alarms > 0
            if self.stage is not None:
                self._durations[self.stage.place.what].append(now - self.since)
            self.stage = stage
            self.since = now
            self.alarms = 0
            return "moves again" if had_alarm else ""
        if now - self.since > (self.alarms + 1) * self.limit():
            self.alarms += 1
            return "alarm"
        return ""


def summary(reports: Sequence[Report], silent: Sequence[str], now: float) -> str:
    """Returns a sentence: what is wrong with processes, and for each kind of wait the longest, its holder and limiting flag."""
    parts = [f"no answer from {process}" for process in silent[:LONGEST_LIST]]
    if len(silent) > LONGEST_LIST:
        parts.append(f"no answer from {len(silent) - LONGEST_LIST} more")
    by_kind: dict[str, list[tuple[float, Report, Wait]]] = defaultdict(list)
    for report in reports:
        parts += report.problems
        for wait in report.waits:
            by_kind[wait.what].append((wait.since, report, wait))
    for what, waits in by_kind.items():
        since, report, wait = min(waits, key=lambda found: found[0])
        detail = f": {wait.detail}" if wait.detail else ""
        limit = f" ({wait.flag} limits it)" if wait.flag else ""
        parts.append(
            f"{len(waits)} wait for {what}, the longest for {now - since:.0f} s in {report.process}{detail}{limit}"
        )
    return "; ".join(parts) or "no process is in a known wait, see the stacks"
