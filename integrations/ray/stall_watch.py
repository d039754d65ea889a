"""The thread of the feature ``stall`` in each process of a Ray job, and the command ``rl-accel stacks``.

The thread looks at its process every few seconds. In the trainer's process, where a stage of the training step is on a stack, it
raises the alarm and asks the other processes, through Ray's key-value store: the event loops of actors may be blocked.
"""

import atexit
import contextlib
import json
import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import psutil

from rl_accel.features import StallFlags
from rl_accel.integrations.ray import propagate
from rl_accel.patches.seams import Registration
from rl_accel.telemetry.stall import Patience, Places, Report, Seen, Wait, find_places, live_stacks, stack_text, summary

logger = logging.getLogger("rl_accel")

LOOK_SECONDS = 10.0
"""Seconds between two looks, which date waits and answer questions."""
LOOKS_TO_ANSWER = 3
"""Looks in which a process must answer. A process that does not is stopped, dead, or holds Python's global lock."""
PY_SPY_SECONDS = 3


def stall_switch(name: str, target: str, places: Places, folder: Callable[[], str | None]) -> Registration:
    """Returns the switch that runs the thread in each process that imports the module of ``target``.

    ``folder`` returns the folder for files with stacks; None stands for the folder of Ray's logs.
    """
    running: list[Watch] = []
    return Registration(
        name=name,
        target=target,
        register=lambda flags: running.append(Watch(places, flags, folder)),
        unregister=lambda: running.pop().stop(),
        find=lambda: running[0] if running else None,
        owner=__name__,
    )


class Watch:
    """Thread that looks at the stacks of this process until :meth:`stop`. For the arguments see :func:`stall_switch`."""

    def __init__(self, places: Places, flags: StallFlags, folder: Callable[[], str | None]) -> None:
        self._places = places
        self._patience = Patience(flags.patience)
        self._folder = folder
        self._waits: dict[tuple[Any, ...], Wait] = {}
        self._finished = "nothing"
        self._looked = 0.0
        self._answered = ("", "")
        self._seconds = LOOK_SECONDS if flags.patience is None else min(LOOK_SECONDS, flags.patience / 4)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rl-accel stall", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # a thread in Ray's code must not outlive Ray

    def stop(self) -> None:
        """Ends the thread after its present look."""
        self._end.set()
        self._thread.join(PY_SPY_SECONDS)
        atexit.unregister(self.stop)

    def _run(self) -> None:
        while not self._end.wait(self._seconds):
            try:
                self._look(time.time())
                if propagate.is_connected():
                    self._answer()
            except Exception:  # a run must not suffer from its observer
                logger.debug("rl-accel: stall cannot look at this process", exc_info=True)

    def _look(self, now: float) -> None:
        stage = None
        waits = {}
        for _name, frames in live_stacks():
            seen = find_places(frames, self._places)
            stage = next((found for found in reversed(seen) if found.place.step is not None), stage)
            if seen and seen[-1].place.step is None:
                place, _detail, _step, identity = seen[-1]
                details = [found.detail for found in seen if found.detail and found.place.step is None]
                since = self._waits[identity].since if identity in self._waits else now
                waits[identity] = Wait(place.what, ", ".join(details), since, place.flag)
        for identity in self._waits.keys() - waits.keys():
            self._finished = f"{self._waits[identity].what} {self._waits[identity].detail} at {time.ctime(now)}"
        self._waits = waits
        self._looked = now
        before = self._patience.stage
        since = self._patience.since
        event = self._patience.look(stage, now)
        if event == "alarm" and stage is not None:
            self._alarm(stage, now)
        elif event == "moves again" and before is not None:
            logger.warning("rl-accel: stall: moves again after %.0f s in %s", now - since, _text_of(before))

    def _alarm(self, stage: Seen, now: float) -> None:
        reports, silent = ask(LOOKS_TO_ANSWER * self._seconds) if propagate.is_connected() else ([], [])
        reports.insert(0, self._report(now))
        line = f"for {now - self._patience.since:.0f} s in {_text_of(stage)}; {summary(reports, silent, now)}"
        folder = self._folder() or _node().get_logs_dir_path()
        path = Path(folder) / "stall" / f"step_{stage.step}.txt"
        logger.warning("rl-accel: stall: %s; stacks in %s", line, path)
        texts = [f"{time.ctime(now)}: {line}", *(f"no answer from {process}" for process in silent)]
        for report in reports:
            texts.append(report.text)
            if self._patience.alarms == 1:  # later ones would repeat them
                texts.append(report.stacks)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write("\n".join(texts) + "\n\n")

    def _report(self, question: float) -> Report:
        # a wait that only the last look has seen is a call that happened to run
        waits = sorted(
            (wait for wait in self._waits.values() if wait.since < self._looked), key=lambda wait: wait.since
        )
        children, child_stacks = _children()
        stage = self._patience.stage
        lines = [f"{process_name()}, last finished: {self._finished}"]
        if stage is not None:
            lines.append(f"  since {time.ctime(self._patience.since)} in {_text_of(stage)}")
        lines += [f"  since {time.ctime(wait.since)} waits for {wait.what}: {wait.detail}" for wait in waits]
        lines += [f"  {child}" for child in children]
        problems = [f"{child} ({process_name()})" for child in children if child.endswith(psutil.STATUS_STOPPED)]
        stacks = "\n".join([stack_text(), *child_stacks])
        return Report(process_name(), question, waits, problems, "\n".join(lines), stacks)

    def _answer(self) -> None:
        """Stores a report for other processes if there is a new question. A first report makes this process known."""
        asked = (propagate.get("stall/question") or "0", process_name())  # an actor gets its name late
        if asked != self._answered:
            self._answered = asked
            propagate.put(f"stall/process/{_address()}", json.dumps(self._report(float(asked[0]))))


def _text_of(stage: Seen) -> str:
    detail = f" ({stage.detail})" if stage.detail else ""
    return f"{stage.place.what} of step {stage.step}{detail}"


def _node() -> Any:
    from ray._private import worker  # not earlier: verl sets variables that Ray reads when it is imported

    return worker._global_node


def _address() -> str:
    return f"{_node().node_ip_address} pid {os.getpid()}"


def _title() -> str:
    """Returns the title of this process: ``ray::<class>.<method>`` in an actor, the program in a driver."""
    return psutil.Process().cmdline()[0]


def process_name() -> str:
    """Returns the class of this Ray actor, or "driver", its rank if it has one, its address and process id."""
    role = _title().removeprefix("ray::").partition(".")[0] if _title().startswith("ray::") else "driver"
    rank = f" rank {os.environ['RANK']}" if "RANK" in os.environ else ""
    return f"{role}{rank} on {_address()}"


def _children() -> tuple[list[str], list[str]]:
    """Returns the state of each child process of this actor, and their stacks if py-spy is installed."""
    states = []
    texts = []
    # all processes of a cluster may be children of the driver
    for child in psutil.Process().children(recursive=True) if _title().startswith("ray::") else ():
        with contextlib.suppress(psutil.Error, subprocess.SubprocessError):
            states.append(f"child process {child.pid} {child.name()} is {child.status()}")
            if py_spy := shutil.which("py-spy"):
                command = [py_spy, "dump", "--nonblocking", "--pid", str(child.pid)]
                texts.append(subprocess.check_output(command, text=True, timeout=PY_SPY_SECONDS))
    return states, texts


def ask(seconds: float, job: str = "") -> tuple[list[Report], list[str]]:
    """Asks all processes of ``job``, the id of a Ray job ("": this one), except the calling process.

    Returns their reports, and a line for each process that has not answered within ``seconds``, each actor that has died, and each
    actor or placement group that Ray has not placed.
    """
    question = time.time()
    propagate.put("stall/question", repr(question), job)
    deadline = time.monotonic() + seconds
    prefix = "stall/process/"
    while True:
        reports = {}
        for name in propagate.names(prefix, job):
            process, answered, waits, *others = json.loads(propagate.get(name, job) or "")
            reports[name.removeprefix(prefix)] = Report(process, answered, [Wait(*wait) for wait in waits], *others)
        reports.pop(_address(), None)
        ended, problems = _actors(job)
        silent = {name for name, report in reports.items() if report.question < question} - ended
        if not silent or time.monotonic() > deadline:
            answers = [report for report in reports.values() if report.question >= question]
            return answers, [*(reports[name].process for name in sorted(silent)), *problems]
        time.sleep(0.5)


def _actors(job: str) -> tuple[set[str], list[str]]:
    """Returns the addresses of actors that have ended, and lines about those that have died or are not placed.

    Ray's control store is asked itself, since its dashboard may be off.
    """
    import ray
    from ray.core.generated.gcs_pb2 import ActorTableData

    ended = set()
    lines = []
    accessor = ray._private.state.state._connect_and_get_accessor()
    job_id = bytes.fromhex(job or ray.get_runtime_context().get_job_id())
    for data in accessor.get_actor_table(ray.JobID(job_id), None):
        actor = ActorTableData.FromString(data)
        address = f"{actor.address.ip_address} pid {actor.pid}"
        if actor.state == ActorTableData.DEAD:
            ended.add(address)
            if "worker process has died" in str(actor.death_cause):
                lines.append(f"{actor.class_name} on {address}, which has died")
        elif actor.state in (ActorTableData.DEPENDENCIES_UNREADY, ActorTableData.PENDING_CREATION):
            lines.append(f"{actor.class_name}, which Ray has not placed: it wants {dict(actor.required_resources)}")
    for group in ray.util.placement_group_table().values():
        if group["state"] == "PENDING":
            lines.append(f"a placement group, which Ray has not placed: it wants {list(group['bundles'].values())}")
    return ended, lines


@click.command()
def stacks() -> None:
    """Shows what the processes of a running job wait for, and their stacks. The job must have the feature stall on.

    The variable RAY_ADDRESS names the Ray cluster if this machine belongs to several.
    """
    import ray

    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    jobs = [job["JobID"] for job in ray._private.state.jobs() if not job["IsDead"]]
    watched = [job for job in jobs if propagate.names("stall/process/", job)]
    if not watched:
        raise click.ClickException("no running job of this cluster has the feature stall on")
    for job in watched:
        reports, silent = ask(LOOKS_TO_ANSWER * LOOK_SECONDS, job)
        click.echo(f"job {job}: {summary(reports, silent, time.time())}")
        for report in reports:
            click.echo(f"{report.text}\n{report.stacks}")
