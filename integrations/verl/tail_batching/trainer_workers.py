"""The agent-loop workers as the trainer process sees them: it distributes responses over them and collects their events."""

import contextlib
import logging
import secrets
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError

from rl_accel.errors import first_line
from rl_accel.integrations.verl.tail_batching.messages import RESUME
from rl_accel.integrations.verl.tail_batching.trainer_servers import RolloutServers
from rl_accel.rollout.round_driver import REPORT_SECONDS, Event, Job

logger = logging.getLogger("rl_accel")

KEY_PREFIX = f"{secrets.token_hex(4)}/"
"""Prefix of this run's keys in TransferQueue (verl's store of trajectories), which all jobs of a Ray cluster share."""
DELIVERY_SECONDS = 5.0
"""Maximum seconds that the trainer process waits for the agent-loop workers to answer a call. They may be busy or dead."""


class Workers:
    """Client of the agent-loop workers in the trainer process. Distributes responses over the workers and collects their events.

    Args:
        actors: handles of agent-loop workers with the mixin :class:`TailAgentLoopWorker`. A dead worker is removed from this list,
            which verl's agent-loop manager also uses.
        servers: the rollout servers, whose engines are stopped at the end of a round.
    """

    def __init__(self, actors: list[Any], servers: RolloutServers) -> None:
        self._verls_actors = actors
        self._servers = servers
        self._actors = dict(enumerate(actors))
        self._worker_of: dict[int, int] = {}  # index of the worker, by id of each unfinished response
        self._load: Counter[int] = Counter()
        self._jobs: defaultdict[int, list[Job]] = defaultdict(list)
        self._cancels: defaultdict[int, list[int]] = defaultdict(list)
        self._polls: dict[int, Any] = {}
        self._sent: list[Any] = []

    def begin_round(self) -> None:
        self._servers.resume()

    def end_round(self) -> None:
        if self._worker_of:
            self._send(engines_stop=True)  # a response that is aborted before its worker knows of this counts as failed
            ray.wait(self._sent, num_returns=len(self._sent), timeout=DELIVERY_SECONDS)
            self._servers.abort()

    def launch(self, job: Job) -> None:
        """Assigns the responses of ``job`` to the worker with the fewest responses. The next :meth:`wait` sends them to it."""
        if not self._actors:
            raise RuntimeError(f"rl_accel.tail_batching: every agent-loop worker has died. {RESUME}")
        index = min(self._actors, key=lambda i: self._load[i])
        self._load[index] += len(job.response_ids)
        self._worker_of.update(dict.fromkeys(job.response_ids, index))
        self._jobs[index].append(
            replace(job, prompt_id=f"{KEY_PREFIX}{job.prompt_id}")
        )  # verl derives keys from this id

    def cancel(self, response_ids: Iterable[int]) -> None:
        for response_id in response_ids:
            if response_id in self._worker_of:
                self._cancels[self._worker_of[response_id]].append(response_id)

    def wait(self, seconds: float) -> list[Event]:
        """Sends new starts and cancellations to the workers, then waits up to ``seconds`` for events.

        If no event arrives in time, ends calls to dead engines, which might never return, and returns [].
        """
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
        if not ready:
            self._servers.end_calls_of_dead()
        return events

    def outside_engines(self) -> list[int]:
        """Returns the ids of responses without a request in an engine, from workers that answer within :data:`DELIVERY_SECONDS`."""
        calls = [actor.outside_engines.remote() for actor in self._actors.values()]
        ids: list[int] = []
        for answer in ray.wait(calls, num_returns=len(calls), timeout=DELIVERY_SECONDS)[0]:
            with contextlib.suppress(RayActorError):
                ids += ray.get(answer)
        return ids

    def wait_for_cleanup(self) -> None:
        """Waits until no worker has a cancelled agent loop that cleans up, which the end of the run would cut off."""
        calls = [actor.cleaned_up.remote() for actor in self._actors.values()]
        while waiting := ray.wait(calls, num_returns=len(calls), timeout=REPORT_SECONDS)[1]:
            logger.info("rl-accel: %d agent-loop workers still clean up cancelled responses", len(waiting))

    def _send(self, engines_stop: bool = False) -> None:
        for index in {**self._jobs, **self._cancels}:
            if index in self._actors:
                call = self._actors[index].act.remote(self._jobs[index], self._cancels[index], engines_stop)
                self._sent.append(call)
        self._jobs.clear()
        self._cancels.clear()
        if self._sent:
            done, self._sent = ray.wait(self._sent, num_returns=len(self._sent), timeout=0)
            for call in done:
                with contextlib.suppress(RayActorError):  # the worker's pending call of next_events reports the death
                    ray.get(call)

    def _collect(self, index: int) -> list[Event]:
        try:
            events: list[Event] = ray.get(self._polls.pop(index))
        except RayActorError as error:
            lost = sorted(response_id for response_id, worker in self._worker_of.items() if worker == index)
            self._verls_actors.remove(self._actors.pop(index))
            line = f"agent-loop worker {index} died: {first_line(error)}"
            logger.error("rl-accel: %s; %d responses are lost with it", line, len(lost))
            events = [Event("failed", response_id, error=line, lost=True) for response_id in lost]
        for event in events:
            if event.kind != "generated":
                self._load[self._worker_of.pop(event.response_id)] -= 1
        return events
