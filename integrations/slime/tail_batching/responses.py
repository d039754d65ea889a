"""Generates and scores single responses with slime's ``generate_and_rm``, and stops cancelled responses, for tail batching."""

import asyncio
import contextlib
import copy
import inspect
import itertools
import logging
import math
import queue
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
from slime.utils.types import Sample

from rl_accel.errors import ConfigError, typed_line
from rl_accel.features import TailBatchingFlags
from rl_accel.integrations.slime import interfaces
from rl_accel.patches.slime.requests import WATCHER
from rl_accel.rollout.cleanup import CancellableCode, Interruptible, agent_loop_limit
from rl_accel.rollout.round_driver import Event, FailureLog, Job, ResponseLost, TokenRate

if TYPE_CHECKING:
    server_control: interfaces.ServerControl
    sglang_rollout: interfaces.SglangRollout
    rm_hub: interfaces.RmHub
    async_utils: interfaces.AsyncUtils
    http_utils: interfaces.HttpUtils
    misc: interfaces.Misc
else:
    from slime.backends.sglang_utils import server_control
    from slime.rollout import rm_hub, sglang_rollout
    from slime.utils import async_utils, http_utils, misc

logger = logging.getLogger("rl_accel")

GENERATE = f"{__name__}.generate"

ABORT_AGAIN_SECONDS = 0.5
"""Seconds between two abort messages for the same request. The first message may reach the server before the request does."""
INSIST_SECONDS = 5.0
"""Seconds within which a server should end a cancelled response. Otherwise its task is cancelled, too. Chosen by hand."""
IDLE_SECONDS = 30.0
"""Maximum seconds to wait after a rollout until no rollout server holds a request. Chosen by hand."""
POLL_SECONDS = 0.05  # between two looks whether servers still hold requests
PING_SECONDS = 30.0
"""Timeout in seconds of a rollout server's health check. A server that is late counts as slow, not as dead. Chosen by hand."""
LOSSES = 3
"""Maximum number of responses that one prompt may lose to dead servers in a rollout, as a multiple of ``n_samples_per_prompt``.
Further losses use up the flag ``max_retries``, because the prompt itself may crash the servers. Chosen by hand."""
RESUME = "Start again with --load from the last checkpoint; no prompt is lost by that"
ABORT_ALL = {"abort_all": True}


@dataclass(eq=False)
class Session(Interruptible):
    """One response that is being generated and scored, and the state of its requests to rollout servers.

    Implements :class:`~rl_accel.patches.slime.requests.RequestWatcher`. Times are in seconds of the monotonic clock.

    Attributes:
        requests: ids of the requests that a server is processing.
        tokens: number of generated tokens; 0 until generation has ended.
        lost: error message if a server has died or has aborted the response, or ''.
        deaths_before: number of dead servers when the last request was sent.
        began: time of the start of generation.
        cancelled_at: time of the cancellation; infinity if the response is not cancelled.
        abort_again_at: earliest time of the next abort message to the servers.
    """

    response_id: int
    prompt_id: str
    sample: Any
    owner: "Responses"
    requests: set[str] = field(default_factory=set)
    result: Any = None
    tokens: int = 0
    lost: str = ""
    deaths_before: int = 0
    began: float = 0.0
    cancelled_at: float = math.inf
    abort_again_at: float = 0.0

    @property
    def cancelled(self) -> bool:
        return self.cancelled_at < math.inf

    def is_busy(self) -> bool:
        """Returns True while a server processes a request of the response."""
        return bool(self.requests)

    def begin(self) -> str:
        if self.cancelled or self.is_over_limit():  # between two requests of the generate function
            self.interrupt()
        request_id = f"rl-accel-{self.response_id}-{uuid.uuid4().hex}"
        self.requests.add(request_id)
        self.deaths_before = self.owner.engines.deaths
        return request_id

    async def failed(self) -> None:
        """Handles a failed request. Returns if slime should send the request again.

        Raises:
            CancelledError: the response is cancelled.
            ResponseLost: a rollout server has died since the request was sent, or no server is left.
        """
        if self.cancelled:
            self.interrupt()
        if lost := await self.owner.engines.death_since(self.deaths_before):
            self.lost = lost
            raise ResponseLost(lost)

    def end(self, request_id: str, answer: Any) -> None:
        self.requests.discard(request_id)
        meta = answer.get("meta_info", {}) if isinstance(answer, dict) else {}
        if (meta.get("finish_reason") or {}).get("type") == "abort":
            self.lost = "its engine aborted it"
        retractions = meta.get("num_retractions")
        if retractions is not None:
            self.owner.engines.retractions = (self.owner.engines.retractions or 0) + int(retractions)

    def finish(self, result: Any, graded_later: bool) -> None:
        """Records the end of generation, and reports the event ``generated``.

        ``result`` is the return value of the generate function. ``graded_later`` is True if the reward is computed later, for the
        whole prompt group at once.

        Raises:
            CancelledError: the response was cancelled.
            ResponseLost: the response is incomplete, because a server has died or has aborted it.
            RuntimeError: the response has no sample, or the generate function has aborted it.
        """
        self.result = result
        leaves = list(samples_of(result))
        self.tokens = sum(sample.response_length for sample in leaves)
        if self.cancelled:
            raise asyncio.CancelledError
        if not leaves:
            raise RuntimeError("the generate function returned no sample")
        statuses = {sample.status for sample in leaves}
        if self.lost and not statuses <= {Sample.Status.COMPLETED, Sample.Status.TRUNCATED}:
            raise ResponseLost(self.lost)
        # slime accepts an aborted response that has a reward or is excluded from the loss, and so does this method.
        handed_over = graded_later or all(sample.reward is not None or sample.remove_sample for sample in leaves)
        if Sample.Status.ABORTED in statuses and not handed_over:
            raise RuntimeError(f"the generate function aborted the response after {self.tokens} tokens")
        self.owner.token_rate.add(self.tokens, time.monotonic() - self.began)
        self.owner.report(Event("generated", self.response_id, self.tokens))


SESSION: ContextVar[Session] = ContextVar("session")


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Generates a response as slime would, but in limited time. Reports the event ``generated`` before slime rewards it."""
    session = SESSION.get()
    sample.generate_function_path = None
    path = args.custom_generate_function_path
    function = sglang_rollout.generate if path is None else misc.load_function(path)
    extra = {"evaluation": evaluation} if "evaluation" in inspect.signature(function).parameters else {}
    session.began = time.monotonic()
    # slime allows a limited number of responses at once, and counts this response until this function returns.
    code = function(args, sample, sampling_params, **extra)
    async with agent_loop_limit(session.owner.limit) as session.limit:
        result = await session.owner.code.run(code, session.is_busy, session.is_interrupted)
    session.finish(result, args.group_rm)
    return result


def samples_of(result: Any) -> Iterator[interfaces.Sample]:
    """Returns an iterator over the samples in ``result``, which is a sample or a (nested) list of samples."""
    return itertools.chain.from_iterable(map(samples_of, result)) if isinstance(result, list) else iter([result])


class Engines:
    """Rollout servers behind slime's router. Aborts requests on these servers, and removes dead servers from the router.

    Attributes:
        deaths: number of servers that have died so far.
        failure: reason why no server can generate any more, or ''.
        retractions: number of preemptions that the servers reported since the caller last set this to None; None: no report.
    """

    def __init__(self, args: Any) -> None:
        self._router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
        self._looking = asyncio.Lock()
        self.deaths = 0
        self.failure = ""
        self.retractions: int | None = None

    async def death_since(self, deaths: int) -> str:
        """Returns an error message if a server has died since ``self.deaths`` was ``deaths``, or if no server is left; else ''.

        If no death since then is known, checks the health of all servers.
        """
        async with self._looking:  # one check at a time, because all requests of a dead server fail at once
            if self.deaths == deaths and not self.failure:
                async with httpx.AsyncClient(timeout=PING_SECONDS, trust_env=False, verify=False) as client:
                    await self._remove_dead(client)
        return self.failure or ("its server died" if self.deaths > deaths else "")

    async def _remove_dead(self, client: httpx.AsyncClient) -> None:
        """Removes dead servers from slime's router, which checks no health and would send more requests to them."""
        try:
            workers = (await client.get(f"{self._router}/workers")).json()["workers"]
        except httpx.ConnectError as error:
            self.failure = f"the router {self._router} cannot be reached: {error}"
            return
        looks = (client.get(f"{worker['url']}/health") for worker in workers)
        answers = await asyncio.gather(*looks, return_exceptions=True)
        dead = [w for w, answer in zip(workers, answers, strict=True) if isinstance(answer, httpx.ConnectError)]
        for worker in dead:
            logger.error("rl-accel: rollout server %s is dead, its requests go to the others", worker["url"])
            await client.delete(f"{self._router}/workers/{worker['id']}")
            self.deaths += 1
        if len(dead) == len(workers):
            self.failure = f"no rollout server is left behind the router {self._router}"

    async def abort(self, *orders: dict[str, Any]) -> None:
        """Sends each of ``orders`` (JSON bodies for POST ``/abort_request``) to every rollout server.

        A server ignores an order for a request that it does not hold.
        """
        urls = await self._urls()  # the router has no /abort_request
        await asyncio.gather(*(_tell(url, order) for url in urls for order in orders))

    async def drain(self) -> None:
        """Tells all servers to abort all requests, until no server holds one. Returns with a warning after ``IDLE_SECONDS``."""
        give_up = time.monotonic() + IDLE_SECONDS
        while True:
            urls = await self._urls()
            counts = await asyncio.gather(*map(_requests, urls))
            busy = [url for url, count in zip(urls, counts, strict=True) if count]
            if not busy:
                return
            if time.monotonic() > give_up:
                logger.warning("rl-accel: %s still hold requests of cancelled responses", ", ".join(busy))
                return
            await self.abort(ABORT_ALL)
            await asyncio.sleep(POLL_SECONDS)

    async def _urls(self) -> list[str]:
        return [worker["url"] for worker in (await http_utils.get(f"{self._router}/workers"))["workers"]]


async def _tell(url: str, payload: dict[str, Any]) -> None:
    try:
        await http_utils.post(f"{url}/abort_request", payload, max_retries=1)
    except Exception as error:  # a dead server holds no requests
        logger.warning("rl-accel: could not send an abort to %s: %s", url, error)


async def _requests(url: str) -> int:
    try:
        return int(server_control.num_requests_from_load(await http_utils.get(f"{url}/v1/loads?include=core")))
    except Exception as error:
        logger.warning("rl-accel: %s did not report its load: %s", url, error)
        return 0


class Responses:
    """Starts, cancels and reports responses on slime. Implements :class:`~rl_accel.rollout.round_driver.ResponseWorkers`.

    Responses are asyncio tasks on slime's event loop. The public methods are called in the thread of the driver.

    Args:
        args: slime's arguments.
        engines: rollout servers, which abort the requests of cancelled responses.
        new_index: function that returns an unused sample index.
        flags: the user's flags of tail batching. The generate function of a response has ``flags.agent_loop_limit`` seconds.
    """

    def __init__(self, args: Any, engines: Engines, new_index: Callable[[], int], flags: TailBatchingFlags) -> None:
        self._args = args
        self.limit = flags.agent_loop_limit
        self.code = CancellableCode(flags.cleanup_limit)
        self.engines = engines
        self.token_rate = TokenRate()
        self._new_index = new_index
        self._loop = async_utils.get_async_loop().loop
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.report = self._events.put
        self._sessions: dict[int, Session] = {}
        self._launched: Counter[str] = Counter()
        self._losses: Counter[str] = Counter()
        self._groups: dict[str, tuple[list[Session], asyncio.Future[None]]] = {}
        self._stopper: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._ending = False
        self._failures = FailureLog()

    # Called from the driver's thread

    @property
    def prompts_launched(self) -> int:
        """Number of prompts launched in the current rollout, replacements of failed and rejected prompts included."""
        return len(self._launched)

    def begin_round(self) -> None:
        self._launched.clear()
        self._losses.clear()
        self._ending = False

    def launch(self, job: Job) -> None:
        self._loop.call_soon_threadsafe(self._launch, job, self._launched[job.prompt_id])
        self._launched[job.prompt_id] += len(job.response_ids)

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
        if self.engines.failure:
            raise RuntimeError(f"rl_accel.tail_batching: {self.engines.failure}. {RESUME}")
        return events

    def outside_engines(self) -> list[int]:
        sessions = list(self._sessions.items())
        return [i for i, session in sessions if session.began and not session.requests and session.result is None]

    # Called on the event loop

    def _launch(self, job: Job, already: int) -> None:
        template = job.payload["sample"]
        state = sglang_rollout.GenerateState(self._args)
        for number, response_id in enumerate(job.response_ids, start=already):
            sample = copy.deepcopy(template)
            sample.index = self._new_index()
            sample.session_id = str(uuid.uuid4())
            sample.generate_function_path = GENERATE
            sampling_params = state.sampling_params.copy()
            if getattr(self._args, "sglang_enable_deterministic_inference", False):
                sampling_params["sampling_seed"] = self._args.rollout_seed + number
            session = self._sessions[response_id] = Session(response_id, job.prompt_id, sample, self)
            session.task = self._loop.create_task(self._respond(session, sampling_params))
            session.task.add_done_callback(partial(self._report_end, session))

    async def _respond(self, session: Session, sampling_params: dict[str, Any]) -> None:
        SESSION.set(session)
        WATCHER.set(session)
        code = sglang_rollout.generate_and_rm(self._args, session.sample, sampling_params)
        session.result = await self.code.run(code, session.is_busy)
        if self._args.group_rm:
            await self._score_group(session)

    async def _score_group(self, session: Session) -> None:
        """Waits until all responses to the session's prompt are generated and scored as a group (slime's ``--group-rm``).

        The call for the last generated response computes the rewards. The other calls wait for this call.
        """
        if isinstance(session.result, list):  # slime would set ``reward`` on the list
            raise RuntimeError("--group-rm does not go together with a generate function that returns lists")
        group, scored = self._groups.setdefault(session.prompt_id, ([], self._loop.create_future()))
        group.append(session)
        if len(group) < self._args.n_samples_per_prompt:
            try:
                await asyncio.shield(scored)
            finally:
                group.remove(session)
            return
        del self._groups[session.prompt_id]
        members = sorted(group, key=lambda member: member.sample.index)
        try:
            rewards = await rm_hub.batched_async_rm(self._args, [member.result for member in members])
            for member, reward in zip(members, rewards, strict=True):
                member.result.reward = reward
        except BaseException as error:
            of_others = RuntimeError(f"its group could not be scored: {typed_line(error)}")
            scored.set_exception(error if isinstance(error, ConfigError) else of_others)
            raise
        scored.set_result(None)

    def _report_end(self, session: Session, task: "asyncio.Task[None]") -> None:
        if session.cancelled and not session.tokens:
            session.tokens = self.token_rate.estimate(session.cancelled_at - session.began if session.began else 0.0)
        event = self._failures.event_of(session.response_id, task, session.tokens, session.result, session.cancelled)
        if event.lost:
            self._losses[session.prompt_id] += 1
            event = replace(event, lost=self._losses[session.prompt_id] <= LOSSES * self._args.n_samples_per_prompt)
        del self._sessions[session.response_id]
        self.report(event)

    def _cancel(self, response_ids: Iterable[int]) -> None:
        for response_id in response_ids:
            session = self._sessions.get(response_id)
            if session is None or session.cancelled:
                continue
            session.cancelled_at = time.monotonic()
            # An aborted request returns its partial output, which confirms the stop and tells the number of tokens.
            if not session.requests:
                session.task.cancel()
        self._changed.set()
        if self._stopper is None or self._stopper.done():
            self._stopper = self._loop.create_task(self._stop_cancelled())

    async def _stop_cancelled(self) -> None:
        while stopping := [session for session in self._sessions.values() if session.cancelled]:
            self._changed.clear()
            now = time.monotonic()
            due = [s for s in stopping if s.requests and (self._ending or now >= s.abort_again_at)]
            for session in due:
                session.abort_again_at = now + ABORT_AGAIN_SECONDS
            if due:
                running = [{"rid": request_id} for session in due for request_id in session.requests]
                try:
                    await self.engines.abort(*([ABORT_ALL] if self._ending else running))
                except Exception as error:  # without the router, the connections can still be closed
                    logger.warning("rl-accel: could not send an abort to the servers: %s", error)
                    for session in stopping:
                        session.task.cancel()
            for session in stopping:
                if now - session.cancelled_at > INSIST_SECONDS:
                    session.task.cancel()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), ABORT_AGAIN_SECONDS)
