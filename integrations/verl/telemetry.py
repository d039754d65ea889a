"""Timing of a training step's stages on verl: ``+rl_accel.telemetry.enable=True``. Observes only and does not change training.

:func:`wire` adds :class:`RecordingWorker` to verl's agent-loop workers, which then record when each response began, was generated
and was rewarded. In the trainer process, :class:`TelemetryObserver` fetches these records once a step, computes metrics, and saves
the records for ``rl-accel profile``.
"""

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rl_accel.errors import first_line
from rl_accel.features import ByNameFlags
from rl_accel.integrations.verl import agent_loop
from rl_accel.integrations.verl.engines import engine_of, read_servers
from rl_accel.log import warn_once
from rl_accel.patches.patch import Patch
from rl_accel.patches.seams import step_observer
from rl_accel.patches.verl import config_intake, overlap_validation
from rl_accel.patches.verl.interfaces import AgentLoopManager, ObservedClient
from rl_accel.patches.verl.verl_run import VerlRun
from rl_accel.telemetry import metrics, stage_clock
from rl_accel.telemetry.server_counters import ANSWER_SECONDS, Counters
from rl_accel.telemetry.stage_clock import CANCELLED, COMPLETED, FAILED, FILE_NAME, ResponseTimes

FILE_KEY = "trainer.rl_accel_telemetry"
"""Key in verl's configuration for the path of the file with response records."""
WORKER_PART = f"{__name__}.RecordingWorker"
ATTEMPTS = 3
"""Number of steps in a row with an unknown number of preemptions, after which telemetry stops asking the rollout servers. Servers
that do not answer would slow down every step."""
_MOST_RECORDS = 200_000
"""Maximum number of response records that an agent-loop worker keeps until the trainer process fetches them. More than
a step has; a record takes some 200 bytes."""
_FLAG = "rl_accel.telemetry"


# In the driver


def wire(run: VerlRun, _flags: ByNameFlags) -> None:
    """Adds :class:`RecordingWorker` to the agent-loop workers in the configuration of ``run``. Idempotent.

    Raises:
        ConfigError: the user's configuration names an agent-loop manager other than rl-accel's.
    """
    agent_loop.check(run, _FLAG, "agent loops must note completion times")
    # An absolute path: the trainer process may have another working directory than this driver process.
    folder = os.path.abspath(run.get("trainer.default_local_dir", "."))
    run.set(FILE_KEY, run.get(FILE_KEY, os.path.join(folder, FILE_NAME)))
    agent_loop.choose(run, WORKER_PART)


# In an agent-loop worker

CURRENT: ContextVar[ResponseTimes | None] = ContextVar("rl_accel_response", default=None)
"""Record of the training response that the running asyncio task works on; None in validation."""


class RecordingWorker(agent_loop.WorkerPart):
    """Agent-loop worker mixin that records when each response of training began, was generated, was rewarded and ended."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._responses: deque[ResponseTimes] = deque(maxlen=_MOST_RECORDS)

    async def take_responses(self) -> list[ResponseTimes]:
        """Returns the records of the responses that have ended since the last call."""
        taken = list(self._responses)
        self._responses.clear()
        return taken

    @classmethod
    def attach(cls, manager: AgentLoopManager) -> None:
        """Registers a :class:`TelemetryObserver` of the manager's workers in the trainer process, if telemetry is on."""
        if metrics.observer_of("telemetry") is not None:
            observer = TelemetryObserver(manager.config, manager.agent_loop_workers, manager.llm_client)
            metrics.set_observer("telemetry", observer)

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> Any:
        run = super()._run_agent_loop
        if trajectory["validate"]:
            return await run(sampling_params, trajectory, **kwargs)
        prompt = kwargs.get("uid", trajectory["sample_index"])  # the legacy trainer passes no uid
        response = ResponseTimes(str(prompt), time.time(), outcome=FAILED, step=trajectory["step"])
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
            response.tokens = self.tokens_so_far() if response.tokens is None else response.tokens
            response.ended = time.time()
            self._responses.append(response)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
        if (response := CURRENT.get()) is not None:
            response.generated = time.time()
            outputs = output if isinstance(output, list) else [output]
            response.tokens = sum(sum(item.response_mask) for item in outputs)
            response.tools = outputs[0].metrics.tool_calls if outputs else 0.0  # the same for all outputs of a response
        return await super()._agent_loop_postprocess(output, validate, **kwargs)

    async def _compute_score(self, outputs: Any, kwargs: dict[str, Any]) -> None:
        await super()._compute_score(outputs, kwargs=kwargs)
        if (response := CURRENT.get()) is not None:
            response.rewarded = time.time()


def _note_server(original: Any, _flags: Any) -> Any:
    async def acquire(self: Any, request_id: str, **extra: Any) -> Any:
        server_id, server = await original(self, request_id, **extra)
        if (response := CURRENT.get()) is not None:
            response.server = str(server_id)
        return server_id, server

    return acquire


# In the trainer process


def observe_stages(_step: int, logged: Mapping[str, Any]) -> dict[str, float]:
    """Returns the share of each stage in the duration of a training step, as metrics ``telemetry/share/<stage>``.

    A stage is a part of a step that verl times, such as ``gen``. Returns {} if ``logged``, the metrics that verl logs, are not of a
    training step.
    """
    shares = stage_clock.shares(stage_clock.stages(logged))
    return {f"telemetry/share/{stage}": share for stage, share in shares.items()}


class TelemetryObserver:
    """Computes the telemetry metrics of each logged training step from the records of ``workers`` (:class:`RecordingWorker`).

    ``config`` is verl's configuration. ``client`` is verl's rollout client, which knows the rollout servers.
    """

    def __init__(self, config: Any, workers: Sequence[Any], client: ObservedClient) -> None:
        self._workers = workers
        self._balancer: Any = getattr(client, "_load_balancer", None)
        self._file = Path(OmegaConf.select(config, FILE_KEY))
        self._engine = engine_of(config)
        self._counters = Counters()
        self._early: list[ResponseTimes] = []
        self._silent_steps = 0
        self._slots_each = OmegaConf.select(config, "actor_rollout_ref.rollout.max_num_seqs", default=None) or 0
        self._window_known = VerlRun(config, config_intake.trainer()).generates_within_stage

    def __call__(self, step: int, logged: Mapping[str, Any]) -> dict[str, float]:
        """Returns telemetry metrics, such as ``telemetry/idle_share``. ``logged``: the metrics that verl logs for ``step``."""
        began = time.perf_counter()
        numbers = observe_stages(step, logged)
        if not numbers:
            return {}
        fetched = [*self._early, *self._fetch()]
        # The rollout of the next step may have begun already, during the validation of this step.
        self._early = [response for response in fetched if response.step > step]
        responses = [response for response in fetched if response.step <= step]
        servers = self._servers()
        try:
            stage_clock.keep(self._file, step, responses)
        except OSError as error:
            _warn("responses cannot be kept for rl-accel profile", error)
        metrics_of_step = stage_clock.completion(responses)
        seconds = logged.get("timing_s/gen", 0.0) + overlap_validation.ahead_seconds(config_intake.trainer())
        if self._window_known and responses and seconds > 0:
            metrics_of_step |= stage_clock.generation(responses, seconds, self._slots_each * len(servers) or None)
        if self._slots_each:
            metrics_of_step["slots"] = self._slots_each
        if (preemptions := self._preempted(servers)) is not None:
            metrics_of_step["preemptions"] = preemptions
        metrics_of_step["own_seconds"] = time.perf_counter() - began
        return numbers | {f"telemetry/{name}": float(value) for name, value in metrics_of_step.items()}

    def _fetch(self) -> list[ResponseTimes]:
        """Returns the response records of all workers that answer. The records of a dead worker are lost."""
        import ray

        calls = [worker.take_responses.remote() for worker in self._workers]
        ray.wait(calls, num_returns=len(calls), timeout=ANSWER_SECONDS)
        responses: list[ResponseTimes] = []
        for call in calls:
            try:
                responses += ray.get(call, timeout=0)
            except Exception as error:
                _warn("notes of an agent-loop worker are missing", error)
        return responses

    def _servers(self) -> list[str]:
        import ray

        with contextlib.suppress(Exception):  # on failure, the capacity of the servers and the preemptions are unknown
            return sorted(ray.get(self._balancer.get_all_servers.remote(), timeout=ANSWER_SECONDS))
        return []

    def _preempted(self, servers: list[str]) -> int | None:
        """Returns the number of preemptions on ``servers`` since the last call, or at first since their start; None if unknown."""
        if not servers or self._silent_steps == ATTEMPTS:
            return None
        preemptions = self._counters.take(read_servers(self._engine, servers))
        self._silent_steps = self._silent_steps + 1 if preemptions is None else 0
        return preemptions


def _warn(what: str, error: Exception) -> None:
    warn_once(what, "rl-accel: telemetry: %s: %s", what, first_line(error))


SWITCHES = (
    step_observer("telemetry", lambda _flags: observe_stages),
    Patch(
        name="verl.telemetry.server",
        target="verl.workers.rollout.llm_server:LLMServerClient._acquire_server",
        supports="verl>=0.9",
        params=("self", "request_id", "extra"),
        make=_note_server,
        no_seam="the agent loop's output does not say which server generated it",
        remove_when="the agent loop's output names the server",
        independent=True,
    ),
)
