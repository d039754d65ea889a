"""Runs single responses with slime's own ``generate_and_rm``, stops those that are cancelled, and reports what happens."""

import asyncio
import contextlib
import copy
import logging
import queue
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from slime.rollout import sglang_rollout
from slime.rollout.rm_hub import batched_async_rm
from slime.utils.async_utils import get_async_loop

from rl_accel.integrations.slime.tail_batching.engines import Engines
from rl_accel.integrations.slime.tail_batching.session import GENERATE, SESSION, Session
from rl_accel.patches.slime.requests import WATCHER
from rl_accel.rollout.driver import Event, Job, TokenRate

logger = logging.getLogger("rl_accel")

ABORT_AGAIN_SECONDS = 0.5
"""An abort may have come before its request; it is repeated as long as the request goes on."""
INSIST_SECONDS = 5.0
"""A cancelled response that has not stopped after so long has its task cancelled, and after as long again it is left behind."""


class Responses:
    """The workers of a :class:`~rl_accel.rollout.driver.RolloutDriver`. Responses run on slime's event loop; the host's thread
    calls the public methods.

    Args:
        args: slime's.
        engines: where cancelled requests are aborted.
        new_index: gives every sample an index of its own.
    """

    def __init__(self, args: Any, engines: Engines, new_index: Callable[[], int]) -> None:
        self._args = args
        self._engines = engines
        self._new_index = new_index
        self._loop = get_async_loop().loop
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._sessions: dict[int, Session] = {}
        self._prompts: set[str] = set()
        self._launched: Counter[str] = Counter()
        self._awaiting_judge: dict[str, list[Session]] = {}
        self._stopper: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._ending = False
        self._token_rate = TokenRate()
        self.retractions: int | None = None

    # The host's side

    @property
    def prompts_launched(self) -> int:
        """Prompts of this round so far, those included that replaced others."""
        return len(self._prompts)

    def begin_round(self) -> None:
        self._prompts.clear()
        self._launched.clear()
        self._ending = False

    def launch(self, job: Job) -> None:
        self._prompts.add(job.prompt_id)
        self._loop.call_soon_threadsafe(self._launch, job)

    def cancel(self, response_ids: Iterable[int]) -> None:
        self._loop.call_soon_threadsafe(self._cancel, tuple(response_ids))

    def end_round(self) -> None:
        self._ending = True
        self._loop.call_soon_threadsafe(self._changed.set)

    def wait(self, seconds: float) -> list[Event]:
        try:
            events = [self._events.get(timeout=seconds)]
        except queue.Empty:
            return []
        while not self._events.empty():
            events.append(self._events.get())
        return events

    # The event loop's side

    def _launch(self, job: Job) -> None:
        template = job.payload["sample"]
        state = sglang_rollout.GenerateState(self._args)
        for response_id in job.response_ids:
            sample = copy.deepcopy(template)
            sample.index = self._new_index()
            sample.session_id = str(uuid.uuid4())
            sample.generate_function_path = GENERATE
            sampling_params = state.sampling_params.copy()
            if getattr(self._args, "sglang_enable_deterministic_inference", False):
                sampling_params["sampling_seed"] = self._args.rollout_seed + self._launched[job.prompt_id]
            self._launched[job.prompt_id] += 1
            session = self._sessions[response_id] = Session(response_id, job.prompt_id, sample, self._events.put)
            session.task = self._loop.create_task(self._respond(session, sampling_params))
            session.task.add_done_callback(lambda task, session=session: self._over(session, task))

    async def _respond(self, session: Session, sampling_params: dict[str, Any]) -> None:
        SESSION.set(session)
        WATCHER.set(session)
        session.result = await sglang_rollout.generate_and_rm(self._args, session.sample, sampling_params)
        if self._args.group_rm:
            await self._judge_group(session)

    async def _judge_group(self, session: Session) -> None:
        """Wait until the first R0 responses of the prompt are generated; the last of them has the group judged."""
        if isinstance(session.result, list):  # slime would set the reward of a list
            raise RuntimeError("--group-rm does not go together with a generate function that returns lists")
        group = self._awaiting_judge.setdefault(session.prompt_id, [])
        group.append(session)
        if len(group) < self._args.n_samples_per_prompt:
            session.judged = self._loop.create_future()
            try:
                await session.judged
            finally:
                if session in group:
                    group.remove(session)
            return
        del self._awaiting_judge[session.prompt_id]
        group.sort(key=lambda each: each.sample.index)
        try:
            rewards = await batched_async_rm(self._args, [each.result for each in group])
        except Exception as error:
            for each in group:
                if each.judged is not None and not each.judged.done():
                    each.judged.set_exception(error)
            raise
        for each, reward in zip(group, rewards, strict=True):
            each.result.reward = reward
            if each.judged is not None and not each.judged.done():
                each.judged.set_result(None)

    def _over(self, session: Session, task: "asyncio.Task[Any]") -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if self._sessions.pop(session.response_id, None) is None:
            return  # left behind earlier
        if session.retractions is not None:
            self.retractions = (self.retractions or 0) + session.retractions
        if session.cancelled_at is not None:
            tokens = session.tokens or self._token_rate.estimate(
                session.cancelled_at - session.began if session.began else 0
            )
            self._events.put(Event("aborted", session.response_id, tokens))
        elif error is not None:
            logger.error("rl-accel: response %d failed", session.response_id, exc_info=error)
            line = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
            self._events.put(Event("failed", session.response_id, session.tokens, error=line))
        else:
            self._token_rate.add(session.tokens, time.monotonic() - session.began)
            self._events.put(Event("scored", session.response_id, session.tokens, session.result))

    def _cancel(self, response_ids: Iterable[int]) -> None:
        for response_id in response_ids:
            session = self._sessions.get(response_id)
            if session is None or session.task is None or session.cancelled_at is not None:
                continue
            session.cancelled_at = time.monotonic()
            # A request that its engine aborts answers with what it has: so it is known to have stopped, and how far it got.
            if not session.requests:
                session.task.cancel()
        self._changed.set()
        if self._stopper is None or self._stopper.done():
            self._stopper = self._loop.create_task(self._stop_cancelled())

    async def _stop_cancelled(self) -> None:
        while left := self._cancelled():
            self._changed.clear()
            now = time.monotonic()
            due = [each for each in left if each.requests and (self._ending or now >= each.abort_again)]
            for each in due:
                each.abort_again = now + ABORT_AGAIN_SECONDS
            if due:
                running = [request_id for each in due for request_id in each.requests]
                try:
                    await (self._engines.abort_all() if self._ending else self._engines.abort(running))
                except Exception as error:  # the router is gone: closing connections is what is left
                    logger.warning("rl-accel: engines could not be told to abort: %s", error)
                    self._close(left)
            self._close([each for each in left if now - each.cancelled_at > INSIST_SECONDS])
            for each in left:
                if now - each.cancelled_at > 2 * INSIST_SECONDS:
                    self._leave_behind(each)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), ABORT_AGAIN_SECONDS)

    def _cancelled(self) -> list[Session]:
        return [session for session in self._sessions.values() if session.cancelled_at is not None]

    @staticmethod
    def _close(sessions: Iterable[Session]) -> None:
        for session in sessions:
            if session.task is not None and not session.task.done():
                session.task.cancel()

    def _leave_behind(self, session: Session) -> None:
        """Go on without a response whose judge does not let itself be cancelled."""
        if self._sessions.pop(session.response_id, None) is not None:
            logger.warning("rl-accel: response %d does not stop; the round ends without it", session.response_id)
            self._events.put(Event("aborted", session.response_id, session.tokens))
