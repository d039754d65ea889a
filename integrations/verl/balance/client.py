"""Replacements for router and rollout servers in an agent-loop worker's client, so that a response can migrate between servers."""

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import numpy as np
from cachetools import LRUCache
from ray.exceptions import RayError

from rl_accel.integrations.verl.engines import engine_of, is_death
from rl_accel.integrations.verl.reward_worker_proxy import Method, cancel
from rl_accel.patches.verl.interfaces import RolloutServer, TokenOutput
from rl_accel.rollout.balance import key_of

MOVABLE = {
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logprobs", "max_tokens", "max_new_tokens"),
    *("ignore_eos", "stop_token_ids"),
}
"""Names of the sampling parameters with which a response may migrate. The next server gets the tokens so far as a part of the
prompt, which could change the effect of another parameter, such as ``frequency_penalty``. ``seed`` is also allowed if
``EngineSupport.seeds_by_position`` is True."""
CONVERSATIONS = 100_000
"""Maximum number of conversations whose last replica, with the earlier turns in its cache, is remembered. Chosen by hand."""


class ServerId(str):
    """Name of a rollout server, with the ``request`` that got a slot on this server as an attribute.

    verl's client passes this name to ``release_server``. The attribute tells which request has ended: ``request_id``, which verl
    also passes, is the same for all turns of a conversation.
    """

    request: "BalancedServer"


class Servers:
    """Replacement for the load balancer in verl's client. Waits for a slot from the router actor before each request.

    Args:
        router: handle of a :class:`~rl_accel.integrations.verl.balance.router.BalancedRouter`.
        config: verl's configuration.
        worker: handle of this agent-loop worker, a :class:`~rl_accel.integrations.verl.balance.BalancingWorker`.
    """

    def __init__(self, router: Any, config: Any, worker: Any) -> None:
        self.router, self.engine, self.worker = router, engine_of(config), worker
        rollout = config.actor_rollout_ref.rollout
        self.longest = rollout.response_length, rollout.prompt_length + rollout.response_length
        self._movable = MOVABLE | ({"seed"} if self.engine.seeds_by_position else set())
        self.homes: LRUCache[str, str] = LRUCache(CONVERSATIONS)
        self.acquire_server, self.release_server = Method(self._acquire), Method(self._release)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.router, name)

    async def _acquire(self, request_id: str, prompt_ids: Sequence[int], sampling_params: Any, **media: Any) -> Any:
        prompt = np.asarray(prompt_ids, np.int32)
        ticket, is_text = uuid4().hex, all(data is None for data in media.values())
        response = {
            "prompt": str(key_of(prompt)),
            "prompt_tokens": len(prompt),
            "home": self.homes.get(request_id, ""),
            "movable": self.engine.stop is not None and is_text and sampling_params.keys() <= self._movable,
        }
        try:
            name, server = await self.router.acquire_server.remote(ticket, self.worker, **response)
        except asyncio.CancelledError:
            self.router.release_server.remote("", ticket)
            raise
        server_id = ServerId(name)
        server_id.request = BalancedServer(self, ticket, name, server)
        return server_id, server_id.request

    async def _release(self, server_id: ServerId, request_id: str) -> None:
        request = server_id.request
        self.homes[request_id] = request.name
        self.router.release_server.remote(request.name, request.ticket, request.tokens)


class BalancedServer:
    """Replacement for the rollout server of one request, which may migrate from server to server.

    Attributes:
        ticket: unique id of the request.
        name: name of the request's present server or, at the end, its last server.
        tokens: number of tokens that the last server generated; None before the response is complete.
    """

    def __init__(self, servers: Servers, ticket: str, name: str, server: RolloutServer) -> None:
        self.ticket, self.name, self._servers, self._server = ticket, name, servers, server
        self.tokens: int | None = None
        self.generate, self.abort_request = Method(self._generate), Method(self._abort)
        self.__ray_call__ = Method(self._call)

    async def _abort(self, _request_id: str) -> Any:
        return await self._server.abort_request.remote(self.ticket)

    async def _call(self, function: Any, _request_id: str) -> Any:
        return await self._server.__ray_call__.remote(function, self.ticket)

    async def _generate(self, **request: Any) -> TokenOutput:
        """Generates the response and returns all of it. Goes on with another server if the response migrates or a server dies."""
        whole, router = None, self._servers.router
        prompt, sampling = list(request["prompt_ids"]), request["sampling_params"]
        limit_key = "max_new_tokens" if "max_new_tokens" in sampling else "max_tokens"
        response, total = self._servers.longest
        limit = sampling.get(limit_key) or min(response, total - len(prompt))  # as verl's servers do by default
        while True:
            call = self._server.generate.remote(**{**request, "request_id": self.ticket})
            try:
                output = await call
            except asyncio.CancelledError:
                await cancel(call)
                raise
            except RayError as error:
                if not is_death(error, self._servers.engine):
                    raise
                router.remove_servers.remote([self.name])
                bound = await router.again.remote(self.ticket, None)
                if bound is None:
                    raise
            else:
                whole = output if whole is None else join(whole, output)
                tokens_left, tokens = limit - len(whole.token_ids), len(output.token_ids)
                if output.stop_reason not in ("aborted", "abort") or tokens_left < 1:
                    whole.stop_reason, self.tokens = "completed" if tokens_left < 1 else output.stop_reason, tokens
                    return whole
                bound = await router.again.remote(self.ticket, tokens)
                if bound is None:
                    return whole
                request["prompt_ids"] = prompt + whole.token_ids
                request["sampling_params"] = {**sampling, limit_key: tokens_left}
            self.name, self._server = bound


def join(first: TokenOutput, second: TokenOutput) -> TokenOutput:
    """Appends ``second``, the next part of a response, to ``first``, and returns ``first``.

    If both have an extra field of the same name, ``first`` keeps its own.
    """
    new = len(second.token_ids)
    if new and second.routed_experts is not None:
        before, routed = first.routed_experts, second.routed_experts
        first.routed_experts = routed if before is None else np.concatenate([before, routed[-new:]])
    if second.log_probs is not None:
        first.log_probs = [*(first.log_probs or ()), *second.log_probs]
    if second.num_preempted is not None:
        first.num_preempted = (first.num_preempted or 0) + second.num_preempted
    first.token_ids = [*first.token_ids, *second.token_ids]
    first.stop_reason = second.stop_reason
    first.extra_fields = {**second.extra_fields, **first.extra_fields}
    return first
