"""How often rollout servers took memory from one request for another, by the servers' own counters and nothing else.

What verl reports with each response is no source: it reads 0 or -1 where the engine does not say. A server whose counter cannot be
read makes the number unknown.
"""

import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

from rl_accel.telemetry.server_counters import COUNTERS, counter_in

PATIENCE_SECONDS = 2.0
ATTEMPTS = 3
"""After so many steps in a row without an answer nobody is asked any more: servers that are silent would cost each step."""

_AT_ONCE = 16


class Preemptions:
    """The counters of all servers, step after step.

    Args:
        engine: ``rollout.name``.
        read: returns the counter of a server by its id, None if it cannot be known; default asks the server.
    """

    def __init__(self, engine: str, read: Callable[[str], float | None] | None = None) -> None:
        self._read = read or (lambda server: read_counter(engine, server))
        self._before: dict[str, float] = {}
        self._in_vain = 0

    def take(self, servers: Sequence[str]) -> float | None:
        """Return the preemptions of all ``servers`` since the last call (since their start, at the first); None if unknown.

        A counter that has fallen belongs to a server that was started again.
        """
        if not servers or self._in_vain == ATTEMPTS:
            return None
        with ThreadPoolExecutor(min(len(servers), _AT_ONCE)) as pool:
            values = dict(zip(servers, pool.map(self._read, servers), strict=True))
        known = {server: value for server, value in values.items() if value is not None}
        before, self._before = self._before, {**self._before, **known}
        self._in_vain = 0 if len(known) == len(servers) else self._in_vain + 1
        if self._in_vain:
            return None
        return sum(
            value - (old if (old := before.get(server, 0.0)) <= value else 0.0) for server, value in known.items()
        )


def read_counter(engine: str, server: str) -> float | None:
    """Return the counter of one server: ``host:port`` of vLLM or SGLang, the name of an actor of the CPU engine."""
    try:
        if engine == "hf_cpu":
            stats: Any = ray.get(ray.get_actor(server).get_stats.remote(), timeout=PATIENCE_SECONDS)
            return float(stats.preemptions)
        if engine not in COUNTERS:
            return None
        with urllib.request.urlopen(f"http://{server}/metrics", timeout=PATIENCE_SECONDS) as answer:
            return counter_in(answer.read().decode(errors="replace"), COUNTERS[engine])
    except Exception:  # whatever keeps a server from answering, its counter is unknown
        return None
