"""How often rollout servers took memory from one request for another, by the servers' own counters and nothing else.

What verl reports with each response is no source: it reads 0 or -1 where the engine does not say. A server whose counter cannot be
read makes the number unknown.
"""

import math
import re
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

PATIENCE_SECONDS = 2.0
ATTEMPTS = 3
"""After so many steps in a row without an answer nobody is asked any more: servers that are silent would cost each step."""
COUNTERS = {
    "vllm": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    "sglang": ("sglang:num_retracted_requests_total",),
}
"""Counters on ``/metrics``. vLLM shows its with rollout.disable_log_stats=False, SGLang (0.5.7 or later) its with metrics enabled.
(SGLang's gauge ``num_retracted_reqs`` is not a count of all so far.)"""
COMPANIONS = {"sglang:num_retracted_requests_total": "sglang:realtime_tokens_total"}
"""SGLang leaves the counter out until the first retraction. The companion came with the same release and is there from the first
token: with it on the page and the counter not, the counter is 0."""

_AT_ONCE = 16
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


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


def counter_in(text: str, names: Sequence[str]) -> float | None:
    """Return the value of the first of the counters ``names`` that is in Prometheus' ``text``, None if it cannot be known.

    It is added up over labels. But all ranks of one SGLang engine count the same event, each with labels ``tp_rank`` and such: of
    those that differ in nothing but a rank (other than ``dp_rank``) the largest is taken.
    """
    companions = {COMPANIONS[name] for name in names if name in COMPANIONS}
    found: Mapping[str, dict[frozenset[tuple[str, str]], list[float]]] = {name: {} for name in (*names, *companions)}
    for line in text.splitlines():
        name, _, rest = line.replace("{", " {", 1).partition(" ")
        if name in found:
            labels, _, numbers = rest.rpartition("}")
            places = frozenset(
                (label, value)
                for label, value in _LABEL.findall(labels)
                if label == "dp_rank" or not label.endswith("_rank")
            )
            value = float(numbers.split()[0])  # a time may follow the value
            found[name].setdefault(places, []).append(value)
    for name in names:
        groups = found[name].values()
        if groups and all(math.isfinite(value) for values in groups for value in values):
            return sum(max(values) for values in groups)
    silent = [name for name in names if not found[name]]
    return 0.0 if any(found.get(COMPANIONS.get(name, "")) for name in silent) else None
