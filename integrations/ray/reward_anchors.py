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
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from rl_accel.errors import first_line
from rl_accel.features import RewardTimeoutFlags
from rl_accel.reward.adaptive_timeout import AdaptiveTimeout
from rl_accel.reward.anchor_store import AnchorDelta, AnchorStore, LocalAnchors, Update
from rl_accel.switch import forget_when_off

logger = logging.getLogger("rl_accel")

EXCHANGE_SECONDS = 1.0
_PATIENCE_SECONDS = 10.0
"""Seconds after which a message that the anchor store (a Ray actor) has not answered is logged. Chosen by hand."""
_REPLY_SECONDS = 5.0
"""Maximum seconds that the logging of a training step waits for the counts of reward executions. Counts that come later appear in
the next step."""
_COUNTS = (
    *("executions", "correct", "timeouts", "timeouts_full", "killed", "cancelled", "probes", "suspended", "errors"),
    *("seconds", "waited_seconds", "saved_seconds"),
    *("eval_executions", "eval_errors"),
    *("workers_replaced", "reward_workers_lost", "store_unreachable"),
)
"""Names of the counts of reward executions that are logged even if they are 0."""
_handles: dict[Any, Any] = {}
"""Handles of actors that store anchors (longest correct executions), by actor id. Kept because Ray ends an actor if the process
that created it drops the handle."""
forget_when_off.append(_handles.clear)


def store_name() -> str:
    """Returns the name of this Ray job's anchor store (actor that shares the longest correct executions).

    It contains the job's id, because jobs may share a Ray namespace.
    """
    return f"rl_accel_reward_anchors_{ray.get_runtime_context().get_job_id()}"


def anchor_store(path: str | None, flags: RewardTimeoutFlags) -> Any:
    """Returns the actor that stores the anchors (longest correct executions) of this Ray job. Creates the actor if there is none.

    ``path`` is the file to which the actor saves the anchors; None: it keeps them in memory only.
    """
    handle = (
        ray.remote(AnchorStore)
        .options(name=store_name(), get_if_exists=True, num_cpus=0, max_restarts=-1)
        .remote(Path(path) if path else None, AdaptiveTimeout(flags))
    )
    return _handles.setdefault(handle._actor_id, handle)


_clients: weakref.WeakSet["StoreClient"] = weakref.WeakSet()
_clients_lock = threading.Lock()


def flush_here(_actor: Any = None) -> None:
    """Sends this process's counts of reward executions to the anchor store, the Ray actor that sums them up.

    Blocks for a few seconds at most.

    Must not be called on an event loop, because it waits for the event loops of this process.
    """
    with _clients_lock:
        loops = [(client, client.loop) for client in _clients if client.loop and ray.is_initialized()]
    flushes = [asyncio.run_coroutine_threadsafe(client.flush(), loop) for client, loop in loops if loop.is_running()]
    concurrent.futures.wait(flushes, _REPLY_SECONDS)


def flush(actors: Sequence[Any]) -> None:
    """Makes the Ray ``actors`` send their counts of reward executions to the anchor store, an actor that sums them up.

    Waits for at most a few seconds.
    """
    calls = [actor.__ray_call__.remote(flush_here) for actor in actors]
    ray.wait(calls, num_returns=len(calls), timeout=_REPLY_SECONDS)


class StoreClient:
    """Exchanges anchors and counts of executions with the anchor store once a second, until shortly after the last :meth:`use`.

    An anchor is the longest correct execution of a test case. The store is the Ray actor through which all processes share anchors.
    Runs on the event loop on which :meth:`use` is called. Does nothing outside a Ray job. ``anchors`` holds this process's copy of
    the anchors, and its counts. ``path`` is the file of the store, or None.
    """

    def __init__(self, anchors: LocalAnchors, path: str | None) -> None:
        self._anchors, self._path = anchors, path
        self._task: asyncio.Task[None] | None = None
        self._wanted = self._silent = False
        self._handle: Any = None
        self._call: tuple[AnchorDelta, asyncio.Future[Update]] | None = None
        self._exchanging = asyncio.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None
        with _clients_lock:
            _clients.add(self)

    def use(self) -> None:
        """Starts to exchange anchors and counts with the anchor store (a Ray actor) each second, if not yet started.

        The exchange ends a few seconds after the last call of this method.
        """
        self._wanted = True
        if ray.is_initialized() and (self._task is None or self._task.done()):
            self.loop = asyncio.get_running_loop()
            self._task = self.loop.create_task(self._keep_up())

    async def close(self) -> None:
        """Ends the periodic exchange with the anchor store (a Ray actor), and sends it the last counts of executions."""
        if self._task is not None:
            self._task.cancel()
        if ray.is_initialized():
            await self._exchange()

    async def flush(self) -> None:
        """Sends all of this process's counts of reward executions to the anchor store, the Ray actor that sums them up."""
        for _ in range(2):  # the first exchange may only end an earlier call that lacks the latest counts
            await self._exchange()

    async def _keep_up(self) -> None:
        idle = 0
        while idle < 3:  # the idle exchanges send the last results of a step
            self._wanted, idle = False, 0 if self._wanted else idle + 1
            await self._exchange()
            await asyncio.sleep(EXCHANGE_SECONDS)

    async def _exchange(self) -> None:
        """Sends this process's new anchors and counts of executions to the anchor store. Merges the anchors in the store's answer.

        Anchors are the longest correct executions of test cases; the store is a Ray actor that shares them between processes.

        If the answer is late, the next exchange waits for it and sends nothing, because sending the counts again would add them
        twice.
        """
        async with self._exchanging:
            if self._call is None:
                delta = self._anchors.take_delta()
                self._call = delta, asyncio.ensure_future(self._ask(delta))
            delta, call = self._call
            try:
                update = await asyncio.wait_for(asyncio.shield(call), _PATIENCE_SECONDS)
            except TimeoutError:
                self._complain("it takes long")
                return
            except (RayError, ValueError) as error:  # ValueError: the actor ended during the look-up
                self._handle = None
                self._anchors.put_back(delta)
                self._complain(first_line(error))
            else:
                self._silent = False
                self._anchors.apply(update)
            self._call = None

    async def _ask(self, delta: AnchorDelta) -> Update:
        if self._handle is None:
            self._handle = anchor_store(self._path, self._anchors.timeout.flags)
        update: Update = await self._handle.exchange.remote(delta)
        return update

    def _complain(self, why: str) -> None:
        self._wanted = True  # keeps up the exchange until the changes are sent
        self._anchors.count("store_unreachable")
        if not self._silent:
            logger.warning("rl-accel: the store of reward anchors does not answer: %s", why)
        self._silent = True


class Collector:
    """Fetches the counts of reward executions of all processes, in the process that logs training steps.

    The anchor store, a Ray actor, sums up the counts. If the actor dies, counts that it has not handed out are lost. If it answers
    too late, the counts appear in the next step.
    """

    def __init__(self) -> None:
        self._incarnation = ""
        self._reply: Any = None

    def __call__(self, _step: int, _logged: Mapping[str, Any]) -> dict[str, float]:
        """Returns counts of reward executions since the last call, by metric name; {} before the anchor store's first answer."""
        if not ray.is_initialized():
            return {}
        try:
            if self._reply is None:
                self._reply = ray.get_actor(store_name()).take_counts.remote()
            incarnation, counts = ray.get(self._reply, timeout=_REPLY_SECONDS)
        except (RayError, ValueError) as error:  # ValueError: there is no actor of that name
            if not isinstance(error, GetTimeoutError):
                self._reply = None
            if not self._incarnation:
                return {}
            logger.warning("rl-accel: no numbers of this step's rewards: %s", first_line(error))
            return {"reward_timeout/store_unreachable": 1.0}
        restarts = float(self._incarnation not in ("", incarnation))
        self._incarnation, self._reply = incarnation, None
        named = {**dict.fromkeys(_COUNTS, 0.0), **counts, "store_restarts": restarts}
        return {f"reward_timeout/{name}": value for name, value in named.items()}
