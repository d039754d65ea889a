"""Store of reward anchors as a named Ray actor, with a client for each process and a collector of counts.

A reward anchor is the duration of the longest correct reward execution so far for a prompt and test case. Time limits are derived
from anchors.

The first process of a Ray job that needs the store creates its actor. If the actor's process dies, Ray restarts the actor, which
loads its last save. If the process that created the actor has died as well, the next process that needs the store creates another
actor. Grading never waits for the actor.
"""

import asyncio
import concurrent.futures
import logging
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from rl_accel.errors import first_line
from rl_accel.features import RewardTimeoutFlags
from rl_accel.reward.adaptive_timeout import SAVE_SECONDS, AdaptiveTimeout, AnchorStore, LocalAnchors
from rl_accel.switch import forget_when_off

logger = logging.getLogger("rl_accel")

EXCHANGE_SECONDS = 1.0
_PATIENCE_SECONDS = 10.0
"""Seconds after which a message that the anchor store has not answered is given up. It is sent again later. Chosen by hand."""
_REPLY_SECONDS = 5.0
"""Maximum seconds that the logging of a training step waits for the counts of reward executions. Counts that come later appear in
the next step."""
_COUNTS = (
    *("executions", "correct", "timeouts", "timeouts_full", "killed", "cancelled", "probes", "widened", "errors"),
    *("seconds", "waited_seconds", "saved_seconds"),
    *("eval_executions", "eval_errors"),
    *("workers_replaced", "reward_workers_lost", "store_unreachable"),
)
"""Names of the counts of reward executions that are logged even if they are 0."""
_handles: dict[Any, Any] = {}
"""Handles of anchor stores by actor id. Kept because Ray ends an actor if the process that created it drops the handle."""
forget_when_off.append(_handles.clear)


def store_name() -> str:
    """Returns the name of this Ray job's anchor store. It contains the job's id, because jobs may share a Ray namespace."""
    return f"rl_accel_reward_anchors_{ray.get_runtime_context().get_job_id()}"


def anchor_store(path: str | None, flags: RewardTimeoutFlags) -> Any:
    """Returns the actor that stores the anchors of this Ray job. Creates the actor if there is none.

    ``path`` is the file to which the actor saves the anchors; None: it keeps them in memory only.
    """
    handle = (
        ray.remote(AnchorStore)
        .options(name=store_name(), get_if_exists=True, num_cpus=0, max_restarts=-1)
        .remote(Path(path) if path else None, AdaptiveTimeout(flags))
    )
    return _handles.setdefault(handle._actor_id, handle)


def in_this_job() -> dict[str, dict[str, Any]]:
    """Returns default arguments of ``ray.init`` with which a grader's process joins this Ray job; {} outside Ray."""
    if not ray.is_initialized():
        return {}
    context = ray.get_runtime_context()
    # Tasks of the grader need the variables and packages of the job.
    job = {"address": context.gcs_address, "namespace": context.namespace, "runtime_env": dict(context.runtime_env)}
    return {"ray.init": {**job, "log_to_driver": False}}


_clients: weakref.WeakSet["StoreClient"] = weakref.WeakSet()
_clients_lock = threading.Lock()


def flush_here(_actor: Any = None) -> None:
    """Sends this process's counts of reward executions to the anchor store. Blocks for a few seconds at most.

    Must not be called on an event loop, because it waits for the event loops of this process.
    """
    with _clients_lock:
        loops = [(client, client.loop) for client in _clients if client.loop and ray.is_initialized()]
    flushes = [asyncio.run_coroutine_threadsafe(client.exchange(), loop) for client, loop in loops if loop.is_running()]
    concurrent.futures.wait(flushes, _REPLY_SECONDS)


def flush(actors: Sequence[Any]) -> None:
    """Makes the Ray ``actors`` send their counts of reward executions to the anchor store. Waits for at most a few seconds."""
    calls = [actor.__ray_call__.remote(flush_here) for actor in actors]
    ray.wait(calls, num_returns=len(calls), timeout=_REPLY_SECONDS)


class StoreClient:
    """Exchanges anchors and counts of executions with the anchor store once a second, until shortly after the last :meth:`use`.

    Runs on the event loop on which :meth:`use` is called. Does nothing outside a Ray job. ``anchors`` holds this process's copy of
    the anchors, and its counts. ``path`` is the file of the store, or None.
    """

    def __init__(self, anchors: LocalAnchors, path: str | None) -> None:
        self._anchors = anchors
        self._path = path
        self._task: asyncio.Task[None] | None = None
        self._is_wanted = False
        self._is_silent = False
        self._handle: Any = None
        self._answered_at = -SAVE_SECONDS
        self._exchanging = asyncio.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None
        with _clients_lock:
            _clients.add(self)

    def use(self) -> None:
        """Starts to exchange anchors and counts with the anchor store each second, if not yet started.

        The exchange ends a few seconds after the last call of this method.
        """
        self._is_wanted = True
        if ray.is_initialized() and (self._task is None or self._task.done()):
            self.loop = asyncio.get_running_loop()
            self._task = self.loop.create_task(self._keep_up())

    async def close(self) -> None:
        """Ends the periodic exchange with the anchor store, and sends it the last counts of executions."""
        if self._task is not None:
            self._task.cancel()
        await self.exchange()

    async def _keep_up(self) -> None:
        idle = 0
        while idle < 3:  # the idle exchanges send the last results of a step
            idle = 0 if self._is_wanted else idle + 1
            self._is_wanted = False
            await self.exchange()
            await asyncio.sleep(EXCHANGE_SECONDS)

    async def exchange(self) -> None:
        """Sends this process's new anchors and all its counts to the store, and merges the anchors in the answer.

        Sends and receives all anchors if the store may have been restarted since the last answer.
        """
        if not ray.is_initialized():
            return
        async with self._exchanging:
            everything = time.monotonic() - self._answered_at > SAVE_SECONDS
            try:
                if self._handle is None:
                    self._handle = anchor_store(self._path, self._anchors.timeout.flags)
                message = self._anchors.message(everything)
                call = self._handle.exchange.remote(self._anchors.process, message, everything)
                answer = await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(call)), _PATIENCE_SECONDS)
            except TimeoutError:
                self._complain("it takes long")
            except (RayError, ValueError) as error:  # ValueError: the actor ended during the look-up
                self._handle = None
                self._answered_at = -SAVE_SECONDS
                self._complain(first_line(error))
            else:
                self._is_silent = False
                self._answered_at = time.monotonic()
                self._anchors.merge(answer)

    def _complain(self, why: str) -> None:
        self._is_wanted = True  # keeps up the exchange until the changes are sent
        self._anchors.count("store_unreachable")
        if not self._is_silent:
            logger.warning("rl-accel: the store of reward anchors does not answer: %s", why)
        self._is_silent = True


class Collector:
    """Fetches the counts of reward executions of all processes, in the process that logs training steps.

    The anchor store keeps the totals of each process. If it is restarted, the processes send their totals again. If it answers too
    late, the counts appear in the next step.
    """

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, float]] = {}
        self._reply: Any = None

    def __call__(self, _step: int, _logged: Mapping[str, Any]) -> dict[str, float]:
        """Returns counts of reward executions since the last call, by metric name; {} before the anchor store's first answer."""
        if not ray.is_initialized():
            return {}
        try:
            if self._reply is None:
                self._reply = ray.get_actor(store_name()).totals.remote()
            totals, anchors = ray.get(self._reply, timeout=_REPLY_SECONDS)
        except (RayError, ValueError) as error:  # ValueError: there is no actor of that name
            if not isinstance(error, GetTimeoutError):
                self._reply = None
            if not self._seen:
                return {}
            logger.warning("rl-accel: no numbers of this step's rewards: %s", first_line(error))
            return {"reward_timeout/store_unreachable": 1.0}
        self._reply = None
        counts = dict.fromkeys(_COUNTS, 0.0)
        for process, of_process in totals.items():
            seen = self._seen.setdefault(process, {})
            for name in _COUNTS:
                counts[name] += of_process.get(name, 0.0) - seen.get(name, 0.0)
            self._seen[process] = of_process
        return {f"reward_timeout/{name}": value for name, value in {**counts, "anchors": float(anchors)}.items()}
