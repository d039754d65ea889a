"""The LLM client that agent loops generate with: verl's own, over servers that stop what is cancelled and may die."""

import asyncio
import logging
from typing import Any

from ray.exceptions import RayActorError
from verl.workers.rollout.llm_server import LLMServerClient

from rl_accel.integrations.verl.tail_batching.calls import CancellableServer, ServerDied

logger = logging.getLogger("rl_accel")

ABORTS_BY_ID = ("hf_cpu",)
"""Engines whose ``abort_request`` works; it returns the tokens so far. (vLLM's, as verl 0.9 calls it, looks up ids that
vLLM 0.24 no longer uses.)"""


class TailLLMServerClient(LLMServerClient):
    """verl's client for a sync trainer. A server that turns out to be dead is taken from the load balancer.

    The trainer starts it again and puts it back after the round, see ``Servers``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._found_dead: dict[str, str] = {}

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        acquiring = asyncio.ensure_future(super()._acquire_server(request_id, **extra))
        try:
            server_id, server = await asyncio.shield(acquiring)
        except asyncio.CancelledError:
            acquiring.add_done_callback(lambda done: self._give_back(done, request_id))
            raise
        except RuntimeError as error:  # the load balancer has none left
            if not self._found_dead:
                raise
            dead = "; ".join(f"{name}: {why}" for name, why in self._found_dead.items())
            raise ServerDied(f"no rollout server is left; dead are {dead}") from error

        async def on_death(line: str) -> None:
            await self._remove(server_id, line)

        return server_id, CancellableServer(
            server, self.config.actor_rollout_ref.rollout.name in ABORTS_BY_ID, on_death
        )

    async def _remove(self, server_id: str, line: str) -> None:
        """Let nobody choose this server any more: having the fewest requests, a dead one would be given every retry."""
        if server_id not in self._found_dead:
            logger.error("rl-accel: rollout server %s is dead, its requests go to the others: %s", server_id, line)
        self._found_dead[server_id] = line
        try:
            await self._load_balancer.remove_servers.remote([server_id])
        except RayActorError:
            logger.exception("rl-accel: the load balancer is dead")

    def _give_back(self, acquired: "asyncio.Future[tuple[str, Any]]", request_id: str) -> None:
        # Else the load balancer would count a request on this server for ever.
        if not acquired.cancelled() and acquired.exception() is None:
            self._release_server(acquired.result()[0], request_id=request_id)
