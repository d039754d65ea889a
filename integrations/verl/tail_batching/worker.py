"""Agent-loop workers of tail batching: they start, cancel and report single responses."""

import asyncio
import contextlib
import contextvars
import functools
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_accel.features import TAIL_BATCHING
from rl_accel.integrations.verl.agent_loop import WorkerPart
from rl_accel.integrations.verl.reward_worker_proxy import proxies
from rl_accel.integrations.verl.tail_batching import ROLLOUT_N
from rl_accel.integrations.verl.tail_batching.messages import ServerLost, StoredKeys
from rl_accel.integrations.verl.tail_batching.worker_servers import SESSION, Session
from rl_accel.patches.verl.interfaces import AgentLoopOutput, AgentLoopTQ, AgentLoopWorkerTQ
from rl_accel.rollout.cleanup import CancellableCode, agent_loop_limit
from rl_accel.rollout.round_driver import Event, FailureLog, Job
from rl_accel.runtime import RUNTIME

if TYPE_CHECKING:
    _Worker = AgentLoopWorkerTQ
else:
    _Worker = object

logger = logging.getLogger("rl_accel")

GATHER_SHARE = 0.005
GATHER_SECONDS = 1.0
"""A worker collects state changes of responses for a moment and reports them together, so that the trainer process gets fewer
messages. The moment lasts the share GATHER_SHARE of the time since the worker's round (rollout) began, which hardly makes the round
longer, and at most GATHER_SECONDS."""
ENGINES_STOP_SECONDS = 2.0
"""At the end of a round (rollout), the engines abort all requests at once. The worker then looks every ENGINES_STOP_SECONDS whether
its requests have ended. If none has ended since the last look, it cancels the rest one by one. Chosen by hand."""


class TailAgentLoopWorker(WorkerPart, _Worker):
    """Agent-loop worker mixin that runs each training response in a separate asyncio task. Validation runs as in verl.

    A cancelled response is reported as aborted when it has no request any more and writes nothing. Its agent loop may still clean
    up. The report names the response's TransferQueue entries, which the trainer process removes after the round.
    """

    outermost = True  # so that this mixin stops cancelled responses before any other mixin sees them

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reward_loop_worker_handles: Any = proxies(self.reward_loop_worker_handles, self.config)
        filter_groups = self.config.algorithm.get("filter_groups") or {}
        self._filter_metric = str(filter_groups.get("metric")) if filter_groups.get("enable", False) else None
        self._sessions: dict[int, Session] = {}
        self._events: list[Event] = []
        self._has_events = asyncio.Event()
        self._servers_lost: ServerLost | None = None
        self._none_left = asyncio.Event()
        self._failures = FailureLog()
        self._busy_since = 0.0
        flags = RUNTIME.flags_of(TAIL_BATCHING)
        self._limit = flags.agent_loop_limit
        self._agent_loops = CancellableCode(flags.cleanup_limit)

    async def act(self, jobs: Sequence[Job], cancel: Sequence[int], engines_stop: bool = False) -> None:
        """Starts the responses of ``jobs``, then cancels the unfinished responses whose ids are in ``cancel``.

        ``engines_stop`` is True if the engines are about to abort all their requests at once. Then only requests that go on after
        this bulk abort are cancelled one by one.
        """
        if jobs and not self._sessions:
            self._busy_since = time.monotonic()
            self._none_left.clear()
        for job in jobs:
            self._launch(job)
        in_engines: list[Session] = []
        for response_id in cancel:
            if (session := self._sessions.get(response_id)) is None or session.cancelled:
                continue
            session.cancelled = True
            if engines_stop and session.generating:
                in_engines.append(session)
            # A write that has started is completed and cleared later. A write cancelled halfway could arrive after the clearing.
            elif not session.storing:
                session.task.cancel()
        if in_engines:
            task = asyncio.create_task(self._insist(in_engines))
            self.background_tasks.add(task)  # verl's set: asyncio itself would not keep the task alive
            task.add_done_callback(self.background_tasks.discard)

    async def _insist(self, in_engines: Sequence[Session]) -> None:
        """Waits for the end of requests that the engines abort. Cancels those that are left once no further one ends."""
        while True:
            await asyncio.sleep(ENGINES_STOP_SECONDS)
            left = [session for session in in_engines if session.generating]
            # While some end, this process may only be busy with thousands of answers.
            if len(left) == len(in_engines):
                break
            in_engines = left
        for session in in_engines:
            session.task.cancel()

    async def next_events(self) -> list[Event]:
        """Waits for an event (a state change of a response), and then a moment for more. Returns all events since the last call.

        Raises:
            ServerLost: no rollout server is left, so the round cannot end.
        """
        await self._has_events.wait()
        if self._servers_lost is not None:
            raise self._servers_lost
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(GATHER_SHARE * (time.monotonic() - self._busy_since), GATHER_SECONDS)):
                await self._none_left.wait()
        self._has_events.clear()
        events = self._events
        self._events = []
        return events

    def _launch(self, job: Job) -> None:
        config = self.config.actor_rollout_ref.rollout
        prompt = {"agent_name": config.agent.default_agent_loop, **job.payload}
        prompt.update(uid=job.prompt_id, global_steps=job.step)
        prompt.pop(ROLLOUT_N, None)
        sampling_params = {
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "repetition_penalty": 1.0,
            "logprobs": config.calculate_log_probs,
        }
        if not prompt.pop("__do_sample__", True):
            # Not at the top of the file, because the import makes rl-accel register a trainer, which imports this module.
            from verl.trainer.ppo.v1 import agent_loop_tq

            verls: AgentLoopTQ = agent_loop_tq
            verls.apply_greedy_sampling_params(sampling_params)
        trajectory = {"step": job.step, "sample_index": prompt.get("index", 0), "rollout_n": 0, "validate": False}
        for number, response_id in enumerate(job.response_ids):
            session = self._sessions[response_id] = Session(response_id)
            context = contextvars.copy_context()
            context.run(SESSION.set, session)
            response = self._run_agent_loop(
                dict(sampling_params),
                trajectory={**trajectory, "rollout_n": number},
                trace=False,
                session_id=response_id,
                **prompt,
            )
            session.task = asyncio.create_task(self._within_limit(session, response), context=context)
            session.task.add_done_callback(functools.partial(self._report_end, session))

    async def _within_limit(self, session: Session, response: Coroutine[Any, Any, Any]) -> None:
        async with agent_loop_limit(self._limit) as session.limit:
            await self._agent_loops.run(response, session.is_busy, session.is_interrupted)

    async def cleaned_up(self) -> None:
        """Waits until no cancelled agent loop cleans up any more."""
        await self._agent_loops.wait()

    def outside_engines(self) -> list[int]:
        """Returns the ids of responses whose agent loop runs without a request in an engine, for example in a tool call."""
        return [i for i, session in self._sessions.items() if not (session.generating or session.keys)]

    def tokens_so_far(self) -> int | None:
        session = SESSION.get()
        return super().tokens_so_far() if session is None else session.tokens

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        session = SESSION.get()
        if session is None:
            await super()._agent_loop_postprocess(output, validate, **kwargs)
            return
        if session.must_end():  # an agent loop may have swallowed the cancellation
            session.interrupt()
        if session.limit is not None:
            session.limit.reschedule(None)  # the time limit holds for the agent loop only
        outputs = output if isinstance(output, list) else [output]
        if not outputs:
            raise RuntimeError("the agent loop returned no output")
        session.tokens = sum(sum(item.response_mask) for item in outputs)
        session.keys = tuple(f"{kwargs['uid']}_{session.response_id}_{index}" for index in range(len(outputs)))
        self._report(Event("generated", session.response_id, session.tokens))
        await super()._agent_loop_postprocess(output, validate, **kwargs)
        session.metric = self._metric_of(outputs[-1])

    async def _compute_teacher_logprobs(self, *args: Any, **kwargs: Any) -> None:
        await super()._compute_teacher_logprobs(*args, **kwargs)
        session = SESSION.get()
        if session is not None:
            if session.must_end():  # what is written from now on would not be cleared
                session.interrupt()
            session.storing = True  # verl writes the trajectories to TransferQueue next

    def _metric_of(self, output: AgentLoopOutput) -> float | None:
        if self._filter_metric is None:
            return None
        others = output.extra_fields.get("reward_extra_info", {})
        metric = output.reward_score if self._filter_metric == "reward" else others.get(self._filter_metric)
        return None if metric is None else float(np.float32(metric))

    def _report_end(self, session: Session, task: "asyncio.Task[None]") -> None:
        """Reports the outcome of a response, whose ``task`` has ended, as an event."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, ServerLost):  # the round cannot end, so the trainer process gets the error
            self._servers_lost = error
            self._has_events.set()
            return
        stored = StoredKeys(session.keys, session.metric) if session.storing else None
        event = self._failures.event_of(session.response_id, task, session.tokens, stored, session.cancelled)
        del self._sessions[session.response_id]
        if not self._sessions:
            self._none_left.set()
        self._report(event)

    def _report(self, event: Event) -> None:
        self._events.append(event)
        self._has_events.set()
