"""Router that sends the responses of a prompt to the same rollout replica, where each can be drafted from the other responses."""

from typing import TYPE_CHECKING, Any

import numpy as np
from cachetools import LRUCache

from rl_accel.drafts.index import key_of
from rl_accel.patches.seams import extends
from rl_accel.patches.verl.interfaces import StickyRouter

if TYPE_CHECKING:
    GlobalRequestLoadBalancer = StickyRouter
else:
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

MARGIN = 4
"""Maximum difference in unfinished requests between a prompt's replica and the least loaded replica. Above this difference, verl's
load balancer chooses the replica for the prompt's next request."""
REMEMBERED = 100_000
"""Maximum number of prompts whose replica is remembered."""


@extends(StickyRouter)
class SiblingRouter(GlobalRequestLoadBalancer):
    """verl's load balancer, extended to send the requests of a prompt to the same replica while the replicas stay balanced."""

    def __init__(self, servers: dict[str, Any], _config: Any = None) -> None:
        super().__init__(servers)
        self._homes: LRUCache[int, str] = LRUCache(REMEMBERED)

    def require_acquire_fields(self) -> list[str]:
        return ["prompt_ids"]

    def acquire_server(self, request_id: str, prompt_ids: Any = ()) -> tuple[str, Any]:
        prompt = key_of(np.asarray(prompt_ids, np.int32))
        running, home = self._inflight_requests, self._homes.get(prompt)
        if home is not None and home in running and running[home] <= min(running.values()) + MARGIN:
            self._request_id_to_server.setdefault(request_id, home)
        server_id, server = super().acquire_server(request_id)
        if home not in running:
            self._homes[prompt] = server_id
        return server_id, server
