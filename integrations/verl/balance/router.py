"""Ray actor that replaces verl's load balancer. A request waits in this router until a rollout server has a free slot."""

import asyncio
import logging
import math
import time
from typing import Any

import ray
from ray.exceptions import RayError

from rl_accel.features import BalanceFlags
from rl_accel.integrations.verl.engines import EngineSupport
from rl_accel.rollout.balance import Balance, Instruction

logger = logging.getLogger("rl_accel")

TICK_SECONDS = 0.25
"""Seconds between two checks of whether a running response should be stopped or moved to another server. Chosen by hand."""


@ray.remote(max_concurrency=1_000_000)  # each waiting response is a pending call of this actor
class BalancedRouter:
    """Router actor: starts and stops responses as the policy :class:`Balance` decides. ``servers``: handles of servers by name."""

    def __init__(self, servers: dict[str, Any], _config: Any = None) -> None:
        self._servers = dict(servers)
        self._balance = Balance(1, BalanceFlags())
        self._engine = EngineSupport()
        self._waiting: dict[str, asyncio.Future[tuple[str, Any] | None]] = {}
        self._ticking: asyncio.Task[None] | None = None
        self._workers: dict[str, Any] = {}  # agent-loop worker of each response, by ticket
        self._watches: dict[Any, asyncio.Task[None]] = {}  # task that waits for the death of a worker, by worker

    async def set_up(self, engine: EngineSupport, lengths: dict[str, list[int]], *args: Any) -> dict[str, int | None]:
        """Creates the policy :class:`Balance`, and starts a task that carries out the policy's decisions.

        Args:
            engine: capabilities of the servers' engine.
            lengths: response lengths of an earlier run in tokens, by prompt.
            args: arguments of :class:`Balance`.

        Returns:
            Size of each server's key-value cache in tokens, by server name; None if unknown.
        """
        self._engine, self._balance = engine, Balance(*args)
        self._balance.learn(lengths)
        self._ticking = asyncio.create_task(self._tick())
        return await self.add_servers(self._servers)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                self._carry_out(self._balance.tick(time.monotonic()))
            except Exception:
                logger.exception("rl-accel: balance: no response was moved this time")

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            server = self._servers[instruction.replica]
            if instruction.stop:
                server.__ray_call__.remote(self._engine.stop, instruction.ticket)
            else:
                self._waiting.pop(instruction.ticket).set_result((instruction.replica, server))

    async def acquire_server(self, request_id: str, worker: Any, **response: Any) -> tuple[str, Any] | None:
        """Waits until a rollout server has a slot for a response.

        Args:
            request_id: new, unique id of the response.
            worker: handle of the requesting agent-loop worker. If this worker dies, the router frees the slots of its responses.
            response: further keyword arguments of :meth:`Balance.request`.

        Returns:
            Name and handle of the server; None if :meth:`release_server` ended the response before a slot was free.

        Raises:
            RuntimeError: there is no rollout server.
        """
        if worker not in self._watches:
            self._watches[worker] = asyncio.create_task(self._watch(worker))
        self._workers[request_id] = worker
        return await self._bound(request_id, self._balance.request(request_id, time.monotonic(), **response))

    async def _watch(self, worker: Any) -> None:
        """Waits until the agent-loop worker ``worker`` dies, then frees the slots of the worker's responses."""
        try:
            await worker.stay_alive.remote()
        except RayError:
            lost = [ticket for ticket, owner in self._workers.items() if owner == worker]
            for ticket in lost:
                self.release_server("", ticket)
            logger.warning(
                "rl-accel: balance: an agent-loop worker died; the slots of its %d responses are free", len(lost)
            )

    async def again(self, ticket: str, tokens: int | None) -> tuple[str, Any] | None:
        """Waits until a server has a slot for the rest of a response that was stopped, or whose server has died.

        Args:
            ticket: unique id of the response.
            tokens: number of tokens that the last server generated before the stop; None if the server died.

        Returns:
            Name and handle of the next server; None if the response has ended, or was stopped by something other than the router.
        """
        instructions = self._balance.again(ticket, time.monotonic(), tokens)
        return None if instructions is None else await self._bound(ticket, instructions)

    async def _bound(self, ticket: str, instructions: list[Instruction]) -> tuple[str, Any] | None:
        future: asyncio.Future[tuple[str, Any] | None]
        future = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        self._carry_out(instructions)
        self._fail_without_servers()
        return await future

    def release_server(self, server_id: str, request_id: str = "", tokens: int | None = None) -> None:
        self._workers.pop(request_id, None)
        if future := self._waiting.pop(request_id, None):
            future.set_result(None)
        self._carry_out(self._balance.over(request_id, time.monotonic(), tokens))

    def take_numbers(self) -> dict[str, float]:
        return self._balance.take_numbers()

    def lengths(self) -> dict[str, list[int]]:
        return {prompt: list(lengths) for prompt, lengths in self._balance.lengths.items() if lengths}

    async def add_servers(self, servers: dict[str, Any]) -> dict[str, int | None]:
        calls = [server.__ray_call__.remote(self._engine.cache_tokens) for server in servers.values()]
        answers = zip(servers, await asyncio.gather(*calls, return_exceptions=True), strict=True)
        caches = {name: answer if isinstance(answer, int) else None for name, answer in answers}
        self._servers.update(servers)
        for name, cache in caches.items():
            self._carry_out(self._balance.add_replica(name, time.monotonic(), cache or math.inf))
        return caches

    def remove_servers(self, server_ids: list[str]) -> None:
        for name in server_ids:
            self._balance.remove_replica(name)
        self._fail_without_servers()

    def _fail_without_servers(self) -> None:
        while self._waiting and not self._balance.running():
            ticket, future = self._waiting.popitem()
            self._balance.over(ticket, time.monotonic())
            future.set_exception(RuntimeError("No available servers in load balancer"))  # verl matches this message

    def require_acquire_fields(self) -> list[str]:
        # rl-accel's client (``Servers``) reads these fields and does not send them on to this actor.
        return ["prompt_ids", "sampling_params", "image_data", "video_data", "audio_data"]

    def require_release_fields(self) -> list[str]:
        return ["request_id"]

    def get_all_servers(self) -> list[str]:
        return list(self._balance.running())
