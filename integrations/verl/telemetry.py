"""The stage clock on verl: ``+rl_accel.telemetry.enable=True``. It observes and changes nothing.

:func:`wire` adds :class:`RecordingWorker` to verl's agent-loop workers, which note when each response began, was generated and got
its reward. In the trainer process :class:`Observer` fetches these notes once a step, has :mod:`rl_accel.telemetry.stage_clock` make
numbers of them, asks the rollout servers for preemptions, and leaves a line in a file, which ``rl-accel profile`` reads.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf, open_dict

from rl_accel.errors import ConfigError
from rl_accel.features import TelemetryFlags
from rl_accel.integrations.verl import agent_loop
from rl_accel.integrations.verl.engines import ON_POLICY_MODES, engine_of, read_servers
from rl_accel.patches.seams import Registration, Seams
from rl_accel.telemetry import metrics, stage_clock
from rl_accel.telemetry.server_counters import ANSWER_SECONDS, Counters
from rl_accel.telemetry.stage_clock import CANCELLED, COMPLETED, FAILED, Generation, Response
from rl_accel.telemetry.steps_file import FILE_NAME, Step, StepsFile

logger = logging.getLogger("rl_accel")

SEAMS: Seams = {
    "verl.experimental.agent_loop.agent_loop:AgentLoopWorker._compute_score": ("self", "outputs", "kwargs"),
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ": None,
}
"""verl 0.9.1 has them."""
SECTION = "trainer.rl_accel_telemetry"
"""What every process finds in verl's configuration: the path of the file."""
WORKER_PART = f"{__name__}.RecordingWorker"
ATTEMPTS = 3
"""So many steps in a row without an answer, and servers are not asked for preemptions any more: silence costs seconds each time."""
_MOST_NOTES = 200_000
"""Responses that a worker remembers if nobody fetches them."""
_FLAG = "rl_accel.telemetry"
_PARTS = ("most", "waiting", "reward", "rest", "after_half")


# In the driver


def wire(config: Any, flags: TelemetryFlags) -> None:
    """Add our part to the agent loops of ``config`` (verl's, changed in place). Idempotent.

    Raises:
        ConfigError: the agent loops are the user's own.
    """
    agent_loop.check(config, _FLAG, "agent loops must note completion times")
    folder = OmegaConf.select(config, "trainer.default_local_dir", default=None) or "."
    with open_dict(config):
        # Absolute: the trainer process may have another working directory than the driver.
        OmegaConf.update(config, SECTION, {"file": str(Path(os.path.abspath(folder)) / FILE_NAME)}, merge=False)
    agent_loop.choose(config, WORKER_PART)


def file_of(config: Any) -> Path | None:
    """Return where the steps are kept, None if ``config`` has not been through :func:`wire`."""
    path = OmegaConf.select(config, f"{SECTION}.file", default=None)
    return Path(path) if path else None


def refuse_unwired(config: Any) -> None:
    """Stop a trainer whose configuration nobody has wired.

    Raises:
        ConfigError: its driver has not called ``validate_config``.
    """
    if file_of(config) is None:
        raise ConfigError(
            f"{_FLAG} wants {SECTION} in the configuration of the trainer, found nothing; "
            "verl's validate_config sets it, which the driver must call before it starts the trainer"
        )


# In an agent-loop worker

CURRENT: ContextVar[Response | None] = ContextVar("rl_accel_response", default=None)
"""The response that the running task works on; None in a validation."""


class RecordingWorker(agent_loop.WorkerPart):
    """Notes responses of training; those of a validation are not noted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._responses: deque[Response] = deque(maxlen=_MOST_NOTES)
        if hasattr(self.llm_client, "_acquire_server"):
            self.llm_client._acquire_server = _noting_the_server(self.llm_client._acquire_server)

    async def take_responses(self) -> list[Response]:
        """Return the responses that have ended since the last call."""
        taken = list(self._responses)
        self._responses.clear()
        return taken

    @classmethod
    def attach(cls, manager: Any) -> None:
        """Tell the observer in the trainer process whom to ask."""
        observer = metrics.observer("telemetry")
        if observer is not None:
            observer.attach(manager.config, manager.agent_loop_workers, manager.llm_client)

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> Any:
        run = super()._run_agent_loop
        if trajectory["validate"]:
            return await run(sampling_params, trajectory, **kwargs)
        prompt = kwargs.get("uid", trajectory["sample_index"])  # the legacy trainer keeps the uid to itself
        response = Response(str(prompt), time.time(), outcome=FAILED)
        before = CURRENT.set(response)
        try:
            result = await run(sampling_params, trajectory, **kwargs)
            response.outcome = COMPLETED
            return result
        except asyncio.CancelledError:
            response.outcome = CANCELLED
            raise
        finally:
            CURRENT.reset(before)
            if response.tokens is None:
                response.tokens = self.tokens_so_far()
            response.ended = time.time()
            self._responses.append(response)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
        response = CURRENT.get()
        if response is not None:
            response.generated = time.time()
            outputs = output if isinstance(output, list) else [output]
            response.tokens = sum(sum(item.response_mask) for item in outputs)
        return await super()._agent_loop_postprocess(output, validate, **kwargs)

    async def _compute_score(self, outputs: Any, kwargs: dict[str, Any]) -> None:
        await super()._compute_score(outputs, kwargs=kwargs)
        response = CURRENT.get()
        if response is not None:
            response.rewarded = time.time()


def _noting_the_server(acquire: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def acquire_server(request_id: str, **extra: Any) -> Any:
        server_id, server = await acquire(request_id, **extra)
        response = CURRENT.get()
        if response is not None:
            response.server = str(server_id)
        return server_id, server

    return acquire_server


# In the trainer process


class Observer:
    """Sees what the trainer logs. Until a manager of agent loops attaches, it knows stages only."""

    def __init__(self) -> None:
        self._workers: Sequence[Any] = ()
        self._balancer: Any = None
        self._file: StepsFile | None = None
        self._asked: list[str] = []
        self._counters: Counters
        self._silent_steps = 0
        self._slots_each: int | None = None
        self._window_known = False
        self._warned: set[str] = set()

    def attach(self, config: Any, workers: Sequence[Any], client: Any) -> None:
        """Begin with the agent loops of a trainer.

        Args:
            config: verl's, which has been through :func:`wire`.
            workers: handles of agent-loop workers with :class:`RecordingWorker`.
            client: verl's client of the rollout servers, whose load balancer knows them all.
        """
        path, engine = file_of(config), engine_of(config)
        self._workers = workers
        self._balancer = getattr(client, "_load_balancer", None)
        self._file = None if path is None else StepsFile(path)
        self._counters, self._silent_steps = Counters(lambda: read_servers(engine, self._asked)), 0
        slots = OmegaConf.select(config, "actor_rollout_ref.rollout.max_num_seqs", default=None)
        self._slots_each = int(slots) if slots else None
        self._window_known = _begins_with_its_stage(config)

    def __call__(self, step: int, logged: Mapping[str, Any]) -> dict[str, float]:
        """Return the numbers of a training step by name, ``telemetry/idle_share``; {} for anything else that is logged."""
        began = time.perf_counter()
        seconds = stage_clock.stages(logged)
        if seconds is None:
            return {}
        responses, servers = self._fetch(), self._servers()
        slots = self._slots_each * len(servers) if self._slots_each and servers else None
        preemptions = self._preempted(servers)
        generation: Generation | None = None
        if self._window_known and responses and seconds.get("gen", 0.0) > 0:
            generation = stage_clock.generation(responses, seconds["gen"], slots=slots)
        self._keep(Step(step, seconds, slots, preemptions, self._window_known, responses))
        numbers = _numbers(seconds, generation, responses)
        if preemptions is not None:
            numbers["preemptions"] = preemptions
        numbers["own_seconds"] = time.perf_counter() - began
        return {f"telemetry/{name}": float(value) for name, value in numbers.items() if value is not None}

    def _fetch(self) -> list[Response]:
        """The responses of all workers that answer; a dead one takes its own with it."""
        if not self._workers:
            return []
        import ray

        calls = [worker.take_responses.remote() for worker in self._workers]
        ray.wait(calls, num_returns=len(calls), timeout=ANSWER_SECONDS)
        responses: list[Response] = []
        for call in calls:
            try:
                responses += ray.get(call, timeout=0)
            except Exception as error:
                self._warn_once("notes of an agent-loop worker are missing", error)
        return responses

    def _servers(self) -> list[str]:
        if self._balancer is None:
            return []
        import ray

        with contextlib.suppress(Exception):  # then capacity and preemptions are unknown
            return sorted(ray.get(self._balancer.get_all_servers.remote(), timeout=ANSWER_SECONDS))
        return []

    def _preempted(self, servers: list[str]) -> int | None:
        """Preemptions since the last call (since their start, at the first); None if unknown."""
        if not servers or self._silent_steps == ATTEMPTS:
            return None
        self._asked = servers
        preemptions = self._counters.take()
        self._silent_steps = 0 if preemptions is not None else self._silent_steps + 1
        return preemptions

    def _keep(self, step: Step) -> None:
        if self._file is None:
            return
        try:
            self._file.add(step)
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
    return mode in ON_POLICY_MODES and stages_a_step == 1


def _numbers(
    seconds: Mapping[str, float], generation: Generation | None, responses: Sequence[Response]
) -> dict[str, float | None]:
    numbers: dict[str, float | None] = {f"share/{stage}": share for stage, share in stage_clock.shares(seconds).items()}
    if not responses:
        return numbers
    numbers["responses"] = len(responses)
    numbers["tokens"] = sum(response.tokens or 0 for response in responses)
    completion = stage_clock.completion(responses)
    if completion is not None:
        numbers |= {f"completion_{name}_seconds": value for name, value in asdict(completion).items()}
    if generation is not None:
        numbers |= {f"{part}_seconds": getattr(generation, part) for part in _PARTS}
        numbers |= {"idle_share": generation.idle, "concurrency": generation.concurrency}
        numbers |= {"cancelled": generation.cancelled, "seconds_per_token": generation.seconds_per_token}
    return numbers


SWITCHES = (
    Registration(
        name="verl.telemetry.observer",
        feature="telemetry",
        target="verl.utils.tracking:Tracking",
        register=lambda _flags: metrics.observe("telemetry", Observer()),
        unregister=lambda: metrics.observe("telemetry", None),
        owner=__name__,
        find=lambda: metrics.observer("telemetry"),
    ),
)
