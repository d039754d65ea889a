"""The store of reward anchors as a named Ray actor, and each process's client of it.

The actor belongs to the job and is made by whoever asks first. Ray starts it again when its process dies, from its last save; if
its owner died with it, the next to ask makes a new one. Nobody waits for it.
"""

import asyncio
import contextlib
import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from rl_accel.features import RewardTimeoutFlags
from rl_accel.reward.adaptive_timeout import AdaptiveTimeout
from rl_accel.reward.anchor_store import AnchorDelta, AnchorStore, Replica, Update

logger = logging.getLogger("rl_accel")

NAME = "rl_accel_reward_anchors"
EXCHANGE_SECONDS = 1.0
SAVE_SECONDS = 30.0
_PATIENCE_SECONDS = 10.0


class AnchorStoreActor:
    """A :class:`AnchorStore` in a process of its own."""

    def __init__(self, path: str | None, flags: dict[str, Any]) -> None:
        timeout = AdaptiveTimeout(RewardTimeoutFlags(**flags))
        self._saved = time.monotonic()
        try:
            self._store = AnchorStore(Path(path) if path else None, timeout)
        except (OSError, ValueError) as error:
            # An actor that raises here would be started for ever; anchors are learned again within a few steps.
            logger.warning("rl-accel: reward anchors of %s cannot be read and are learned anew: %s", path, error)
            self._store = AnchorStore(None, timeout)

    def exchange(self, delta: AnchorDelta) -> Update:
        """See :meth:`AnchorStore.exchange`. Saves now and then."""
        update = self._store.exchange(delta)
        if time.monotonic() - self._saved > SAVE_SECONDS:
            self.save()
        return update

    def take_counts(self) -> dict[str, float]:
        """See :meth:`AnchorStore.take_counts`; ``anchors`` is how many there are. Saves."""
        self.save()
        return {**self._store.take_counts(), "anchors": float(len(self._store))}

    def incarnation(self) -> str:
        """Return what tells this store from one that comes after it."""
        return self._store.incarnation

    def save(self) -> None:
        """See :meth:`AnchorStore.save`. A full disk costs a warning, not the training."""
        self._saved = time.monotonic()
        try:
            self._store.save()
        except OSError as error:
            logger.warning("rl-accel: reward anchors could not be saved: %s", error)


_handles: dict[Any, Any] = {}
"""Of every store that this process has made or met. Ray ends an actor with the handle that it was made with."""


def anchor_store(path: str | None, flags: RewardTimeoutFlags) -> Any:
    """Return the handle of this job's store, which is made if there is none."""
    handle = (
        ray.remote(AnchorStoreActor)
        .options(name=NAME, get_if_exists=True, num_cpus=0, max_restarts=-1)
        .remote(path, asdict(flags))
    )
    return _handles.setdefault(handle._actor_id, handle)


class StoreClient:
    """Keeps ``replica`` and the job's store informed of each other, in the background of the running event loop."""

    def __init__(self, replica: Replica, path: str | None) -> None:
        self._replica = replica
        self._path = path
        self._task: asyncio.Task[None] | None = None
        self._wanted = False
        self._silent = False
        self._handle: Any = None
        self._call: tuple[AnchorDelta, asyncio.Future[Update]] | None = None

    def use(self) -> None:
        """Say that anchors are in use: changes are exchanged for as long as this is said once an interval."""
        self._wanted = True
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._keep_up())

    async def close(self) -> None:
        """Exchange a last time and end."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._exchange()

    async def _keep_up(self) -> None:
        idle = 0
        while idle < 3:  # the last results of a step are counted with it or with the next
            self._wanted, idle = False, 0 if self._wanted else idle + 1
            await self._exchange()
            await asyncio.sleep(EXCHANGE_SECONDS)

    async def _exchange(self) -> None:
        """Send what was learned and take over the answer. A slow call is waited for again: sent twice it would count twice."""
        if self._call is None:
            delta = self._replica.take_delta()
            self._call = delta, asyncio.ensure_future(self._ask(delta))
        delta, call = self._call
        try:
            update = await asyncio.wait_for(asyncio.shield(call), _PATIENCE_SECONDS)
        except TimeoutError:
            self._complain("it takes long")
        except (RayError, ValueError) as error:  # ValueError: it went while it was looked up
            self._call, self._handle = None, None
            self._replica.put_back(delta)
            self._complain(str(error).splitlines()[0])
        else:
            self._call, self._silent = None, False
            self._replica.apply(update)

    async def _ask(self, delta: AnchorDelta) -> Update:
        if self._handle is None:
            self._handle = anchor_store(self._path, self._replica.timeout.flags)
        update: Update = await self._handle.exchange.remote(delta)
        return update

    def _complain(self, why: str) -> None:
        self._wanted = True  # there is more to tell
        self._replica.count("store_unreachable")
        if not self._silent:
            logger.warning("rl-accel: the store of reward anchors does not answer: %s", why)
        self._silent = True
