"""In the trainer process: fetches what agent loops noted, once a step, and makes numbers and a line of a file of it."""

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from omegaconf import OmegaConf

from rl_accel.integrations.verl.server_counters import read_servers
from rl_accel.integrations.verl.telemetry.wiring import file_of
from rl_accel.telemetry import stage_clock
from rl_accel.telemetry.responses import Response
from rl_accel.telemetry.server_counters import Counters
from rl_accel.telemetry.stage_clock import Generation
from rl_accel.telemetry.steps_file import Step, StepsFile

logger = logging.getLogger("rl_accel")

PATIENCE_SECONDS = 5.0
ATTEMPTS = 3
"""So many steps in a row without an answer, and servers are not asked for preemptions any more: silence costs seconds each time."""
_PARTS = ("most", "waiting", "reward", "rest", "after_half")


class Observer:
    """Sees what the trainer logs. Until a manager of agent loops attaches, it knows stages only."""

    def __init__(self) -> None:
        self._workers: Sequence[Any] = ()
        self._balancer: Any = None
        self._file: StepsFile | None = None
        self._engine = ""
        self._asked: list[str] = []
        self._counters: Counters
        self._in_vain = 0
        self._slots_each: int | None = None
        self._window_known = False
        self._warned: set[str] = set()

    def attach(self, config: Any, workers: Sequence[Any], client: Any) -> None:
        """Begin with the agent loops of a trainer.

        Args:
            config: verl's, which has been through ``wire``.
            workers: handles of agent-loop workers that note.
            client: verl's client of the rollout servers, whose load balancer knows them all.
        """
        path = file_of(config)
        self._workers = workers
        self._balancer = getattr(client, "_load_balancer", None)
        self._file = None if path is None else StepsFile(path)
        self._engine = str(config.actor_rollout_ref.rollout.name)
        self._counters, self._in_vain = Counters(lambda: read_servers(self._engine, self._asked)), 0
        slots = OmegaConf.select(config, "actor_rollout_ref.rollout.max_num_seqs", default=None)
        self._slots_each = int(slots) if slots else None
        self._window_known = _begins_with_its_stage(config)

    def __call__(self, step: int, logged: Mapping[str, Any]) -> dict[str, float]:
        """Return the numbers of a training step by name, ``telemetry/idle_share``; {} for anything else that is logged."""
        began = time.perf_counter()
        seconds = stage_clock.stages(logged)
        if seconds is None:
            return {}
        responses = self._fetch()
        servers = self._servers()
        slots = self._slots_each * len(servers) if self._slots_each and servers else None
        preemptions = self._preempted(servers)
        found: Generation | None = None
        each: dict[str, Generation] = {}
        if self._window_known and responses and seconds.get("gen", 0.0) > 0:
            found = stage_clock.generation(responses, seconds["gen"], slots=slots)
            each = stage_clock.by_server(responses, seconds["gen"], self._slots_each)
        self._keep(Step(step, seconds, slots, preemptions, self._window_known, responses), found, each)
        numbers = _numbers(seconds, found, responses)
        if preemptions is not None:
            numbers["preemptions"] = preemptions
        numbers["own_seconds"] = time.perf_counter() - began
        return {f"telemetry/{name}": float(value) for name, value in numbers.items() if value is not None}

    def _fetch(self) -> list[Response]:
        """The notes of all workers that answer; a dead one takes its own with it."""
        if not self._workers:
            return []
        calls = [worker.take_responses.remote() for worker in self._workers]
        ray.wait(calls, num_returns=len(calls), timeout=PATIENCE_SECONDS)
        taken: list[Response] = []
        for call in calls:
            try:
                taken += [Response(*row) for row in ray.get(call, timeout=0)]
            except Exception as error:
                self._warn_once("notes of an agent-loop worker are missing", error)
        return taken

    def _servers(self) -> list[str]:
        if self._balancer is None:
            return []
        with contextlib.suppress(Exception):  # then capacity and preemptions are unknown
            return sorted(ray.get(self._balancer.get_all_servers.remote(), timeout=PATIENCE_SECONDS))
        return []

    def _preempted(self, servers: list[str]) -> int | None:
        """Preemptions since the last call (since their start, at the first); None if unknown."""
        if not servers or self._in_vain == ATTEMPTS:
            return None
        self._asked = servers
        found, _ = self._counters.take()
        self._in_vain = 0 if found is not None else self._in_vain + 1
        return found

    def _keep(self, step: Step, found: Generation | None, servers: Mapping[str, Generation]) -> None:
        if self._file is None:
            return
        try:
            self._file.add(step, found, servers)
        except OSError as error:
            self._warn_once("steps cannot be kept for rl-accel profile", error)

    def _warn_once(self, what: str, error: Exception) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("rl-accel: telemetry: %s: %s", what, str(error).splitlines()[:1])


def _begins_with_its_stage(config: Any) -> bool:
    """Whether generation begins when the stage does. Asynchronous trainers have responses under way then."""
    if not OmegaConf.select(config, "trainer.use_v1", default=False):
        return True
    mode = OmegaConf.select(config, "trainer.v1.trainer_mode", default="sync")
    stages_a_step = OmegaConf.select(config, f"trainer.v1.{mode}.parameter_sync_step", default=1)
    return mode in ("sync", "tail_batching") and stages_a_step == 1


def _numbers(
    seconds: Mapping[str, float], found: Generation | None, responses: Sequence[Response]
) -> dict[str, float | None]:
    numbers: dict[str, float | None] = {f"share/{stage}": share for stage, share in stage_clock.shares(seconds).items()}
    if not responses:
        return numbers
    numbers["responses"] = len(responses)
    numbers["tokens"] = sum(response.tokens or 0 for response in responses)
    completion = stage_clock.completion(responses)
    if completion is not None:
        numbers |= {
            "completion_p50_seconds": completion.p50,
            "completion_p90_seconds": completion.p90,
            "completion_p99_seconds": completion.p99,
            "completion_longest_seconds": completion.longest,
        }
    if found is not None:
        numbers |= {f"{part}_seconds": getattr(found, part) for part in _PARTS}
        numbers |= {"idle_share": found.idle, "concurrency": found.concurrency, "cancelled": found.cancelled}
        numbers["seconds_per_token"] = found.seconds_per_token
    return numbers
