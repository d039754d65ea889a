"""Agent-loop workers that start, cancel and report single responses, and the trainer process's client of these workers."""

import asyncio
import contextlib
import contextvars
import logging
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.exceptions import RayActorError

from rl_accel.integrations.verl.agent_loop import WorkerPart
from rl_accel.integrations.verl.reward_worker_proxy import proxies
from rl_accel.integrations.verl.tail_batching import MODE
from rl_accel.integrations.verl.tail_batching.servers import RESUME, SESSION, RolloutServers, ServerLost, Session
from rl_accel.patches.seams import extends
from rl_accel.patches.verl.interfaces import AgentLoopOutput, AgentLoopTQ, AgentLoopWorkerTQ
from rl_accel.rollout.driver import Event, FailureLog, Job, agent_loop_limit

if TYPE_CHECKING:
    _Worker = AgentLoopWorkerTQ
else:
    _Worker = object

logger = logging.getLogger("rl_accel")

RUN = f"{secrets.token_hex(4)}/"
"""Prefix of this run's TransferQueue keys. All jobs of a Ray cluster share the queue and its partition ``train``."""

GATHER_SHARE, GATHER_SECONDS = 0.005, 1.0
"""Batching window for events while responses run: a share of the round's age, and the maximum in seconds. A call per response
would cost the trainer far more than handling the event."""

ENGINES_STOP_SECONDS = 2.0
"""Seconds without a finished request after the bulk abort until the remaining requests are cancelled one by one. These requests
reached their engine after the abort."""

DELIVERY_SECONDS = 5.0
"""Maximum seconds to wait for workers to answer a call. Responses aborted before their worker got the stop count as failed."""


@dataclass(frozen=True, slots=True)
class Stored:
    """TransferQueue entries of a response.

    Attributes:
        keys: keys of the trajectories; several if the agent loop had several outputs.
        metric: value that group filtering compares; None if filtering is off or the reward function gave no such value.
    """

    keys: tuple[str, ...]
    metric: float | None = None


@extends(AgentLoopWorkerTQ)
class TailAgentLoopWorker(WorkerPart, _Worker):
    """Runs each training response in a separate asyncio task. Validation runs as in verl.

    A cancelled response is reported as aborted, with its TransferQueue entries, after its engine request, its reward call and its
    writes have stopped. The trainer clears the entries once all responses are over: abort, settle, then clear.
    """

    outermost = True  # stops cancelled responses before any other part sees them

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reward_loop_worker_handles: Any = proxies(self.reward_loop_worker_handles, self.config)
        filter_groups = self.config.algorithm.get("filter_groups") or {}
        self._filter_metric = str(filter_groups.get("metric")) if filter_groups.get("enable", False) else None
        self._sessions: dict[int, Session] = {}
        self._events: list[Event] = []
        self._has_events = asyncio.Event()
        self._servers_lost: ServerLost | None = None
        self._all_over = asyncio.Event()
        self._failures = FailureLog()
        self._busy_since = 0.0
        self._limit: float | None = self.config.trainer.v1[MODE].agent_loop_limit

    async def act(self, jobs: Sequence[Job], cancel: Sequence[int], engines_stop: bool = False) -> None:
        """Starts the responses of ``jobs``, then cancels those of ``cancel``. Ids of finished responses are ignored.

        If ``engines_stop``, the engines are about to abort all their requests in bulk, which is far faster than one by one.
        Requests that the bulk abort misses are cancelled individually a little later.
        """
        if jobs and not self._sessions:
            self._busy_since = time.monotonic()
            self._all_over.clear()
        for job in jobs:
            self._launch(job)
        left: list[Session] = []
        for response_id in cancel:
            session = self._sessions.get(response_id)
            if session is None or session.cancelled:
                continue
            session.cancelled = True
            if engines_stop and session.generating:
                left.append(session)
            # A write under way is completed and cleared afterwards: a write cancelled halfway could still arrive later.
            elif not session.storing:
                session.task.cancel()
        if left:
            self._in_background(self._insist(left))

    async def _insist(self, left: Sequence[Session]) -> None:
        before = len(left) + 1
        while len(left) < before:  # thousands of answers can keep this process busy
            before = len(left)
            await asyncio.sleep(ENGINES_STOP_SECONDS)
            left = [session for session in left if session.generating]
        for session in left:
            session.task.cancel()

    async def next_events(self) -> list[Event]:
        """Waits for an event and returns all events since the last call, after a short batching window.

        Raises:
            ServerLost: no rollout server is left.
        """
        await self._has_events.wait()
        if self._servers_lost is not None:
            raise self._servers_lost
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(GATHER_SHARE * (time.monotonic() - self._busy_since), GATHER_SECONDS)):
                await self._all_over.wait()
        self._has_events.clear()
        events, self._events = self._events, []
        return events

    def _launch(self, job: Job) -> None:
        config = self.config.actor_rollout_ref.rollout
        prompt = {"agent_name": config.agent.default_agent_loop, **job.payload}
        prompt.update(uid=job.prompt_id, global_steps=job.step)
        prompt.pop("__rollout_n__", None)
        sampling_params = {
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "repetition_penalty": 1.0,
            "logprobs": config.calculate_log_probs,
        }
        if not prompt.pop("__do_sample__", True):
            # Here, not at the top, to avoid a cycle: this loads verl's trainers, which registers ours, which imports this module.
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
            self._in_background(self._watch(session))

    async def _within_limit(self, session: Session, response: Coroutine[Any, Any, Any]) -> None:
        async with agent_loop_limit(self._limit) as session.limit:
            await response

    def outside_engines(self) -> list[int]:
        """Returns the ids of responses whose agent loop runs but does not generate, for example during a tool call."""
        return [i for i, session in self._sessions.items() if not (session.generating or session.keys)]

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.background_tasks.add(task)
        task.add_done_callback(self.background_tasks.discard)

    def tokens_so_far(self) -> int | None:
        session = SESSION.get()
        return super().tokens_so_far() if session is None else session.tokens

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        session = SESSION.get()
        if session is None:
            await super()._agent_loop_postprocess(output, validate, **kwargs)
            return
        if session.cancelled or session.limit.expired():  # an agent loop may have swallowed the cancellation
            raise asyncio.CancelledError
        session.limit.reschedule(None)  # the limit is for the agent loop only
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
            session.storing = True  # verl writes the trajectories next

    def _metric_of(self, output: AgentLoopOutput) -> float | None:
        if self._filter_metric is None:
            return None
        others = output.extra_fields.get("reward_extra_info", {})
        metric = output.reward_score if self._filter_metric == "reward" else others.get(self._filter_metric)
        return None if metric is None else float(np.float32(metric))

    async def _watch(self, session: Session) -> None:
        """Reports the outcome of a response once its task has ended."""
        await asyncio.wait({session.task})
        error = None if session.task.cancelled() else session.task.exception()
        if isinstance(error, ServerLost):  # the round cannot end: the trainer gets the error
            self._servers_lost = error
            self._has_events.set()
            return
        stored = Stored(session.keys, session.metric) if session.storing else None
        event = self._failures.event_of(
            session.response_id, session.task, session.tokens, stored, cancelled=session.cancelled
        )
        del self._sessions[session.response_id]
        if not self._sessions:
            self._all_over.set()
        self._report(event)

    def _report(self, event: Event) -> None:
        self._events.append(event)
        self._has_events.set()


class Workers:
    """Distributes responses over the agent-loop workers and collects their events, in the trainer process.

    A dead worker is removed from ``actors``, the list that verl's manager distributes validation over.

    Args:
        actors: handles of :class:`TailAgentLoopWorker`.
        servers: the rollout servers, stopped at the end of a round.
    """

    def __init__(self, actors: list[Any], servers: RolloutServers) -> None:
        self._all_actors = actors
        self._servers = servers
        self._actors = dict(enumerate(actors))
        self._home: dict[int, int] = {}  # worker index by id of a response that is not over
        self._load: Counter[int] = Counter()
        self._jobs: defaultdict[int, list[Job]] = defaultdict(list)
        self._cancels: defaultdict[int, list[int]] = defaultdict(list)
        self._polls: dict[int, Any] = {}
        self._orders: list[Any] = []

    def begin_round(self) -> None:
        """Resumes the engines if the last round stopped them."""
        self._servers.resume()

    def end_round(self) -> None:
        """Stops the engines until the next round; all responses still running have been cancelled."""
        if self._home:
            self._send(engines_stop=True)
            ray.wait(self._orders, num_returns=len(self._orders), timeout=DELIVERY_SECONDS)
            self._servers.abort()

    def launch(self, job: Job) -> None:
        """Starts the responses of ``job`` on the worker with the fewest responses.

        Raises:
            RuntimeError: no worker is alive.
        """
        if not self._actors:
            raise RuntimeError(f"rl_accel.tail_batching: every agent-loop worker has died. {RESUME}")
        index = min(self._actors, key=lambda i: self._load[i])
        self._load[index] += len(job.response_ids)
        self._home.update(dict.fromkeys(job.response_ids, index))
        self._jobs[index].append(replace(job, prompt_id=f"{RUN}{job.prompt_id}"))  # verl derives its keys from this id

    def cancel(self, response_ids: Iterable[int]) -> None:
        """Cancels these responses. The event of a response that is already over is under way."""
        for response_id in response_ids:
            if response_id in self._home:
                self._cancels[self._home[response_id]].append(response_id)

    def wait(self, seconds: float) -> list[Event]:
        """Returns events, in order for each worker; empty if none arrives within ``seconds``."""
        self._send()
        for index in self._actors.keys() - self._polls.keys():
            self._polls[index] = self._actors[index].next_events.remote()
        polls = list(self._polls.values())
        ray.wait(polls, num_returns=1, timeout=seconds)
        ready = set(ray.wait(polls, num_returns=len(polls), timeout=0)[0])
        events: list[Event] = []
        for index, poll in list(self._polls.items()):
            if poll in ready:
                events += self._collect(index)
        return events

    def outside_engines(self) -> list[int]:
        """Returns the ids of responses that are neither being generated nor scored; skips workers that answer late."""
        asked = [actor.outside_engines.remote() for actor in self._actors.values()]
        found: list[int] = []
        for answer in ray.wait(asked, num_returns=len(asked), timeout=DELIVERY_SECONDS)[0]:
            with contextlib.suppress(RayActorError):
                found += ray.get(answer)
        return found

    def _send(self, engines_stop: bool = False) -> None:
        for index in {**self._jobs, **self._cancels}:
            if index in self._actors:
                order = self._actors[index].act.remote(self._jobs[index], self._cancels[index], engines_stop)
                self._orders.append(order)
        self._jobs.clear()
        self._cancels.clear()
        if self._orders:
            done, self._orders = ray.wait(self._orders, num_returns=len(self._orders), timeout=0)
            for order in done:
                with contextlib.suppress(RayActorError):  # the worker's poll reports the death
                    ray.get(order)

    def _collect(self, index: int) -> list[Event]:
        try:
            events: list[Event] = ray.get(self._polls.pop(index))
        except RayActorError as error:
            lost = sorted(response_id for response_id, home in self._home.items() if home == index)
            self._all_actors.remove(self._actors.pop(index))
            line = f"agent-loop worker {index} died: {error}".splitlines()[0]
            logger.error("rl-accel: %s; %d responses are lost with it", line, len(lost))
            events = [Event("failed", response_id, error=line, lost=True) for response_id in lost]
        for event in events:
            if event.kind != "generated":
                self._load[self._home.pop(event.response_id)] -= 1
        return events
