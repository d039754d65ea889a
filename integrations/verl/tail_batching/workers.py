"""The agent-loop workers as the trainer sees them: orders go out in bulk, events come in as soon as there are any."""

import contextlib
import logging
from collections.abc import Iterable
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError

from rl_accel.rollout.driver import Event, Job

logger = logging.getLogger("rl_accel")


DELIVERY_SECONDS = 5.0
"""How long the engines are stopped late for workers that do not hear; a response that is aborted by surprise counts as failed."""


class Engines(Protocol):
    """What generates; see :class:`~rl_accel.integrations.verl.tail_batching.servers.Servers`."""

    def abort(self) -> None: ...

    def resume(self) -> None: ...


class Workers:
    """Spreads responses over ``actors`` (handles of ``TailAgentLoopWorker``) and gathers what happens to them.

    One that dies is taken from ``actors``, the list by which verl's manager gives out validation.

    Args:
        actors: the workers.
        engines: what they generate with; it is stopped at the end of a round.
    """

    def __init__(self, actors: list[Any], engines: Engines) -> None:
        self._everybody = actors
        self._engines = engines
        self._actors = dict(enumerate(actors))
        self._running: dict[int, set[int]] = {index: set() for index in self._actors}
        self._home: dict[int, int] = {}
        self._jobs: dict[int, list[Job]] = {}
        self._cancels: dict[int, list[int]] = {}
        self._polls: dict[Any, int] = {}
        self._orders: list[Any] = []

    def begin_round(self) -> None:
        """Let the engines generate, should the last round have stopped them."""
        self._engines.resume()

    def end_round(self) -> None:
        """Stop the engines: whatever still runs was cancelled. They go on with the next round."""
        if not any(self._running.values()):
            return
        self._send(engines_stop=True)
        ray.wait(self._orders, num_returns=len(self._orders), timeout=DELIVERY_SECONDS)
        self._engines.abort()

    def launch(self, job: Job) -> None:
        """Start the responses of ``job`` on the worker that has the fewest.

        Raises:
            RuntimeError: no worker is alive.
        """
        if not self._actors:
            raise RuntimeError("rl_accel.tail_batching: every agent-loop worker has died")
        index = min(self._actors, key=lambda i: len(self._running[i]))
        self._running[index].update(job.response_ids)
        self._home.update(dict.fromkeys(job.response_ids, index))
        self._jobs.setdefault(index, []).append(job)

    def cancel(self, response_ids: Iterable[int]) -> None:
        """Stop these responses. Those that are over already have an event on its way."""
        for response_id in response_ids:
            index = self._home.get(response_id)
            if index is not None:
                self._cancels.setdefault(index, []).append(response_id)

    def wait(self, seconds: float) -> list[Event]:
        """Return events in the order in which each worker reported them; empty if there are none for ``seconds``."""
        self._send()
        waiting = set(self._polls.values())
        for index, actor in self._actors.items():
            if index not in waiting:
                self._polls[actor.next_events.remote()] = index
        ready, _ = ray.wait(list(self._polls), num_returns=1, timeout=seconds)
        if ready and len(self._polls) > 1:
            ready, _ = ray.wait(list(self._polls), num_returns=len(self._polls), timeout=0)
        events = [event for poll in ready for event in self._collect(poll)]
        for event in events:
            if event.kind != "generated":
                self._forget(event.response_id)
        return events

    def _send(self, engines_stop: bool = False) -> None:
        for index in {**self._jobs, **self._cancels}:
            if index in self._actors:
                jobs, cancels = self._jobs.get(index, []), self._cancels.get(index, [])
                order = self._actors[index].act.remote(jobs, cancels, engines_stop)
                self._orders.append(order)
        self._jobs, self._cancels = {}, {}
        if not self._orders:
            return
        done, self._orders = ray.wait(self._orders, num_returns=len(self._orders), timeout=0)
        for order in done:
            with contextlib.suppress(RayActorError):  # its poll says so as well
                ray.get(order)

    def _collect(self, poll: Any) -> list[Event]:
        index = self._polls.pop(poll)
        try:
            return ray.get(poll)
        except RayActorError as error:
            lost = sorted(self._running.pop(index))
            self._everybody.remove(self._actors.pop(index))
            line = f"agent-loop worker {index} died: {error}".splitlines()[0]
            logger.error("rl-accel: %s; %d responses are lost with it", line, len(lost))
            return [Event("failed", response_id, error=line) for response_id in lost]

    def _forget(self, response_id: int) -> None:
        index = self._home.pop(response_id, None)
        if index in self._running:
            self._running[index].discard(response_id)
