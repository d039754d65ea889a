"""Router that sends the responses of a prompt to the same rollout replica, where drafts for each come from the others."""

from typing import TYPE_CHECKING, Any

import numpy as np
from cachetools import LRUCache

from rl_accel.drafts.index import key_of
from rl_accel.patches.verl.interfaces import StickyRouter

if TYPE_CHECKING:
    GlobalRequestLoadBalancer = StickyRouter
else:
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

PROMPTS = 100_000
"""Maximum number of prompts whose replica is remembered; the least recently used are forgotten. It is more than a
step has; a prompt that is forgotten only finds another replica."""
HOME_MARGIN = 4
"""A response goes to the replica of its prompt unless that replica runs over HOME_MARGIN requests more than another. At
half of it, more responses leave those that they are drafted from; at double, replicas are loaded less evenly."""


class SiblingRouter(GlobalRequestLoadBalancer):
    """verl's load balancer, extended to send all responses to a prompt to the same replica, where they help to draft each other.

    If this replica has over :data:`HOME_MARGIN` more running requests than the replica with the fewest, verl chooses the replica.
    """

    def __init__(self, servers: dict[str, Any], _config: Any = None) -> None:
        super().__init__(servers)
        self._homes: LRUCache[int, str] = LRUCache(PROMPTS)

    def require_acquire_fields(self) -> list[str]:
        return ["prompt_ids"]

    def acquire_server(self, request_id: str, prompt_ids: Any = ()) -> tuple[str, Any]:
        prompt = key_of(np.asarray(prompt_ids, np.int32))
        running = self._inflight_requests
        home = self._homes.get(prompt)
        if home is not None and home in running and running[home] <= min(running.values()) + HOME_MARGIN:
            self._request_id_to_server.setdefault(request_id, home)
        server_id, server = super().acquire_server(request_id)
        if home not in running:
            self._homes[prompt] = server_id
        return server_id, server
