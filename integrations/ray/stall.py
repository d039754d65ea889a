"""The thread of the feature ``stall`` in each process of a Ray job, and the command ``rl-accel stacks``.

The thread looks at the stacks of its process every few seconds, and recognises stages and waits by the functions on them. In the
trainer's process, which has the stages of a step, it raises the alarm, and asks the others through Ray's key-value store.
"""

import asyncio
import atexit
import contextlib
import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, NamedTuple

import click
import psutil

from rl_accel.features import StallFlags
from rl_accel.integrations.ray import propagate
from rl_accel.patches.seams import Registration

logger = logging.getLogger("rl_accel")

LOOK_SECONDS = 10.0
"""Seconds between two looks, which date waits and answer questions."""
LOOKS_TO_ANSWER = 3
"""Looks in which a process must answer. A process that does not is stopped, or holds Python's global lock."""
LEAST_PATIENCE = 600.0
"""Seconds that every stage may take by default. First compilations take minutes."""
TIMES_MEDIAN = 5.0
"""Default patience as a multiple of the median duration of the stage. Steps of a healthy run vary by four times."""
START = "start"
"""Stage that loads models. The default patience is :data:`LONGEST_LOAD` if Ray has placed all actors and none has died."""
LONGEST_LOAD = 3600.0
LONGEST_LIST = 6
PY_SPY_SECONDS = 3
QUESTION = "stall/question"
PROCESSES = "stall/process/"


@dataclass(frozen=True)
class Place:
    """A function in which a framework works or waits.

    Attributes:
        what: stage of a training step, such as "update_actor", or kind of a wait, such as "grader".
        detail: template for the function's local variables, or function of its frame; for a wait "" is the function's name.
        step: function that returns the number of the training step from the frame. None: the place is a wait and not a stage.
    """

    what: str
    detail: str | Callable[[FrameType], str] = ""
    step: Callable[[FrameType], int] | None = None


Places = Mapping[str, Mapping[str, Place]]
"""Mapping from module to its places by function, as "function" or "Class.method"; "*" stands for all others."""


class Seen(NamedTuple):
    """A place that was found on a stack. ``identity`` stays equal while the same call of the function runs."""

    place: Place
    detail: str
    step: int
    identity: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.place.what} of step {self.step}" + (f" ({self.detail})" if self.detail else "")


Wait = tuple[float, str, str]
"""Time of the look that first saw the wait of a thread or asyncio task, and its ``what`` and details."""


def live_stacks() -> Iterator[list[FrameType]]:
    """Yields the frames, outermost first, of each thread but the caller's and of each suspended asyncio task."""
    for ident, innermost in sys._current_frames().items():
        if ident != threading.get_ident():
            yield [frame for frame, _line in traceback.walk_stack(innermost)][::-1]
    tasks: Any = getattr(asyncio.tasks, "_scheduled_tasks", None)  # the name since Python 3.12
    for task in list(tasks or vars(asyncio.tasks).get("_all_tasks", ())):
        coroutine: Any = task.get_coro()
        awaiting = []
        while hasattr(coroutine, "cr_await"):
            awaiting.append(coroutine)
            coroutine = coroutine.cr_await
            if type(coroutine).__name__ == "coroutine_wrapper":  # what Ray's compiled coroutines await
                (coroutine,) = gc.get_referents(coroutine)
        if awaiting and not awaiting[0].cr_running:  # a running one is on the stack of its thread
            yield [part.cr_frame for part in awaiting if part.cr_frame is not None]


def find_places(frames: Sequence[FrameType], places: Places) -> list[Seen]:
    """Returns those of ``places`` that are on a stack, in the order of ``frames``; of calls inside the same place the outermost."""
    found: list[Seen] = []
    for frame in frames:
        of_module = places.get(frame.f_globals.get("__name__", ""), {})
        place = of_module.get(frame.f_code.co_qualname) or of_module.get("*")
        if place is None or (found and found[-1].place is place):
            continue
        step = 0
        detail = "" if place.step else frame.f_code.co_name
        with contextlib.suppress(Exception):  # a local variable is not bound yet, or changes at this moment
            step = place.step(frame) if place.step else 0
            if place.detail:
                detail = place.detail(frame) if callable(place.detail) else place.detail.format_map(frame.f_locals)
        found.append(Seen(place, detail, step, (place.what, id(frame), step)))
    return found


def stack_text() -> str:
    """Returns the stacks as text; equal ones once. Values of variables are left out, because they may be secret."""
    counts: Counter[str] = Counter()
    for frames in live_stacks():
        lines = [f"    {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}" for frame in frames]
        counts["\n".join(lines)] += 1
    return "\n".join(f"  {count} at\n{lines}" for lines, count in counts.items())


class Patience:
    """Decides whether the present stage takes too long.

    ``seconds`` limits every stage. None: the limit is the larger of :data:`LEAST_PATIENCE` and :data:`TIMES_MEDIAN` times the
    median duration of the stage so far. While there is no median, the time counts from the last change of the stage's detail,
    such as the number of awaited prompts.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._durations: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=100))
        self._counts_from = 0.0
        self.stage: Seen | None = None
        self.since = 0.0  # time of the look that first saw this stage

    def look(self, stage: Seen | None, now: float) -> bool:
        """Takes the stage at the time ``now``. Returns True after each further patience with the same stage."""
        previous = self.stage
        self.stage = stage
        if stage is None or previous is None or stage.identity != previous.identity:
            if previous is not None:
                self._durations[previous.place.what].append(now - self.since)
            self.since = now
            self._counts_from = now
            return False
        known = self._durations[stage.place.what]
        limit = self._seconds or max(LEAST_PATIENCE, TIMES_MEDIAN * median(known or [0.0]))
        if self._seconds is None and not known and stage.detail != previous.detail:
            self._counts_from = now
        is_late = now - self._counts_from > limit
        if is_late:
            self._counts_from += limit
        return is_late


def summary(waits: Iterable[tuple[Wait, str]], problems: Sequence[str], now: float) -> str:
    """Returns a sentence: ``problems``, and for each kind of wait the number of waits, and the longest with its process."""
    parts = list(problems)
    if len(parts) > LONGEST_LIST:
        parts[LONGEST_LIST:] = [f"{len(parts) - LONGEST_LIST} more processes like these"]
    by_kind: dict[str, list[tuple[Wait, str]]] = defaultdict(list)
    for wait, process in waits:
        by_kind[wait[1]].append((wait, process))
    for what, of_kind in by_kind.items():
        (since, _what, detail), process = min(of_kind)
        parts.append(f"{len(of_kind)} wait for {what}, the longest for {now - since:.0f} s in {process}{detail}")
    return "; ".join(parts) or "no process is in a known wait, see the stacks"


class Watch:
    """Thread that looks at the stacks of this process, for ``places``, until :meth:`stop`."""

    def __init__(self, places: Places, flags: StallFlags) -> None:
        self._places = places
        self._flags = flags
        self._patience = Patience(flags.patience)
        self._alarms = 0  # about the present stage
        self._waits: dict[tuple[Any, ...], Wait] = {}
        self._finished = "nothing"
        self._answered = ""
        self._seconds = LOOK_SECONDS if flags.patience is None else min(LOOK_SECONDS, flags.patience / 4)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rl-accel stall", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # a thread in Ray's code must not outlive Ray

    def stop(self) -> None:
        """Ends the thread after its present look."""
        self._end.set()
        self._thread.join(PY_SPY_SECONDS)

    def _run(self) -> None:
        while not self._end.wait(self._seconds):
            try:
                if propagate.is_connected():
                    now = time.time()
                    self._look(now)
                    self._answer(now)
            except Exception:  # a run must not suffer from its observer
                logger.debug("rl-accel: stall cannot look at this process", exc_info=True)

    def _look(self, now: float) -> None:
        stage = None
        waits = {}
        for frames in live_stacks():
            seen = find_places(frames, self._places)
            stage = next((found for found in reversed(seen) if found.place.step), stage)
            if seen and seen[-1].place.step is None:
                place, _detail, _step, identity = seen[-1]
                detail = "".join(f", {found.detail}" for found in seen if found.detail and found.place.step is None)
                since = self._waits[identity][0] if identity in self._waits else now
                waits[identity] = (since, place.what, detail)
        for identity in self._waits.keys() - waits.keys():
            self._finished = f"{''.join(self._waits[identity][1:])} at {time.ctime(now)}"
        self._waits = waits
        before = self._patience.stage
        since = self._patience.since
        is_late = self._patience.look(stage, now)
        if before is not None and self._alarms and self._patience.since > since:
            self._alarms = 0
            logger.warning("rl-accel: stall: moves again after %.0f s in %s", now - since, before._replace(detail=""))
        if stage is not None and is_late:
            self._alarm(stage, now)

    def _alarm(self, stage: Seen, now: float) -> None:
        propagate.put(QUESTION, repr(now))
        self._answer(now)
        summed_up, text, all_there = answers(now, LOOKS_TO_ANSWER * self._seconds)
        seconds = now - self._patience.since
        if all_there and stage.place.what == START and self._flags.patience is None and seconds < LONGEST_LOAD:
            return
        line = f"for {seconds:.0f} s in {stage}; {summed_up}"
        path = Path(sys.modules["ray._private.worker"]._global_node.get_logs_dir_path()) / "rl_accel_stall.txt"
        logger.warning("rl-accel: stall: %s; stacks in %s", line, path)
        self._alarms += 1
        if self._alarms == 1:  # later stacks would repeat the first
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{time.ctime(now)}: {line}\n{text}\n\n")

    def _answer(self, looked: float) -> None:
        """Stores a report for other processes if there is a new question. A first report makes this process known."""
        question = propagate.get(QUESTION) or "0"
        if question == self._answered:
            return
        self._answered = question
        # a wait that only the last look has seen is a call that happened to run
        waits = sorted(wait for wait in self._waits.values() if wait[0] < looked)
        lines = [f"last finished: {self._finished}"]
        if self._patience.stage is not None:
            lines.append(f"  since {time.ctime(self._patience.since)} in {self._patience.stage}")
        lines += [f"  since {time.ctime(since)} waits for {what}{detail}" for since, what, detail in waits]
        stopped, stacks = _children()
        rank = f" rank {os.environ['RANK']}" if "RANK" in os.environ else ""
        text = "\n".join([*lines, stack_text(), *stacks])
        report = {"question": float(question), "rank": rank, "waits": waits, "stopped": stopped, "text": text}
        address = f"{sys.modules['ray._private.worker']._global_node.node_ip_address} pid {os.getpid()}"
        propagate.put(PROCESSES + address, json.dumps(report))


def stall_switch(name: str, target: str, places: Places) -> Registration:
    """Returns the switch that runs the thread in each process that imports the module of ``target``."""
    running: list[Watch] = []
    return Registration(
        name=name,
        target=target,
        register=lambda flags: running.append(Watch(places, flags)),
        unregister=lambda: running.pop().stop(),
        find=lambda: running[0] if running else None,
        owner=__name__,
    )


def _children() -> tuple[list[str], list[str]]:
    """Returns lines about stopped child processes of this actor, and the stacks of all of them if py-spy is installed."""
    stopped = []
    stacks = []
    me = psutil.Process()
    # all processes of a cluster may be children of the driver
    for child in me.children(recursive=True) if me.name().startswith("ray::") else ():
        with contextlib.suppress(psutil.Error, subprocess.SubprocessError):
            if child.status() == psutil.STATUS_STOPPED:
                stopped.append(f"child process {child.pid} {child.name()} is stopped")
            if py_spy := shutil.which("py-spy"):
                command = [py_spy, "dump", "--nonblocking", "--pid", str(child.pid)]
                stacks.append(subprocess.check_output(command, text=True, timeout=PY_SPY_SECONDS))
    return stopped, stacks


def answers(question: float, seconds: float, job: str = "") -> tuple[str, str, bool]:
    """Waits until all processes of ``job``, the id of a Ray job ("": this one), have answered ``question``, at most ``seconds``.

    Returns a sentence about all of them, their waits and stacks as text, and False if an actor has died or Ray has not placed it.
    """
    import ray
    from ray.core.generated.gcs_pb2 import ActorTableData, PlacementGroupTableData

    deadline = time.monotonic() + seconds
    job_id = ray.JobID(bytes.fromhex(job or ray.get_runtime_context().get_job_id()))
    accessor = ray._private.state.state._connect_and_get_accessor()  # not its dashboard, which may be off
    while True:
        time.sleep(0.5)
        texts = {name.removeprefix(PROCESSES): propagate.get(name, job) for name in propagate.names(PROCESSES, job)}
        reports = {address: json.loads(text or "") for address, text in texts.items()}
        names = {}
        problems = []
        for actor in map(ActorTableData.FromString, accessor.get_actor_table(job_id, None)):
            address = f"{actor.address.ip_address} pid {actor.pid}"
            names[address] = actor.class_name
            is_pending = actor.state in (ActorTableData.DEPENDENCIES_UNREADY, ActorTableData.PENDING_CREATION)
            if is_pending and not actor.pid and actor.required_resources:  # one in its constructor has a process
                problems.append(f"Ray has not placed {actor.class_name}, which wants {dict(actor.required_resources)}")
            if actor.state == ActorTableData.DEAD:
                reports.pop(address, None)
                if "worker process has died" in str(actor.death_cause):
                    problems.append(f"{actor.class_name} on {address} has died")
        if all(report["question"] >= question for report in reports.values()) or time.monotonic() > deadline:
            break
    for group in map(PlacementGroupTableData.FromString, accessor.get_placement_group_table()):
        if group.state == PlacementGroupTableData.PENDING and group.creator_job_id == job_id.binary():
            wanted = [dict(bundle.unit_resources) for bundle in group.bundles]
            problems.append(f"Ray has not placed a placement group, which wants {wanted}")
    all_there = not problems
    named = {f"{names.get(key, 'driver')}{report['rank']} on {key}": report for key, report in reports.items()}
    problems += [f"no answer from {process}" for process, report in named.items() if report["question"] < question]
    answered = {process: report for process, report in named.items() if report["question"] >= question}
    problems += [f"{child} ({process})" for process, report in answered.items() for child in report["stopped"]]
    waits = [(wait, process) for process, report in answered.items() for wait in report["waits"]]
    text = "\n".join(f"{process}, {report['text']}" for process, report in answered.items())
    return summary(waits, problems, time.time()), text, all_there


@click.command()
def stacks() -> None:
    """Shows what the processes of a running job wait for, and their stacks. The job must have the feature stall on.

    The variable RAY_ADDRESS names the Ray cluster if this machine belongs to several.
    """
    import ray

    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    jobs = [job["JobID"] for job in ray._private.state.jobs() if not job["IsDead"]]
    watched = [job for job in jobs if propagate.names(PROCESSES, job)]
    if not watched:
        raise click.ClickException("no running job of this cluster has the feature stall on")
    question = time.time()
    for job in watched:
        propagate.put(QUESTION, repr(question), job)
        summed_up, text, _ = answers(question, LOOKS_TO_ANSWER * LOOK_SECONDS, job)
        click.echo(f"job {job}: {summed_up}\n{text}")
