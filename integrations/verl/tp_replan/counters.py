"""Preemptions of a step: differences of the servers' own counters. What a server does not say is unknown, never 0."""

import logging
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rl_accel.integrations.verl.telemetry.preemptions import COUNTERS, counter_in

logger = logging.getLogger("rl_accel")

PATIENCE_SECONDS = 5.0


@dataclass(frozen=True)
class Reading:
    """What one server says.

    Attributes:
        preemptions: since it started.
        life: differs once it has been started anew.
        kv_use: the largest share of its cache in use since the last reading; None: unknown.
    """

    preemptions: int
    life: str = ""
    kv_use: float | None = None


Read = Callable[[], Mapping[str, Reading | None]]
"""Asks every server, by name. None: it does not say."""


class Counters:
    """Differences between readings of all servers.

    The first reading is of servers that have just started, with counters at 0. Later, a server that is new, was started anew, or
    did not answer the last time makes a step unknown.
    """

    def __init__(self, read: Read) -> None:
        self._read = read
        self._before: Mapping[str, Reading | None] | None = None

    def take(self) -> tuple[int | None, float | None]:
        """Return the preemptions since the last call, and the largest share of a cache in use; None: unknown."""
        now = dict(self._read())
        before, self._before = self._before, now
        if not now or (before is not None and before.keys() != now.keys()):
            return None, None
        preemptions, shares = 0, []
        for name, reading in now.items():
            last = Reading(0, reading.life if reading else "") if before is None else before[name]
            if reading is None or last is None or reading.life != last.life or reading.preemptions < last.preemptions:
                return None, None
            preemptions += reading.preemptions - last.preemptions
            shares.append(reading.kv_use)
        known = [share for share in shares if share is not None]
        return preemptions, max(known) if len(known) == len(shares) else None


def reader(engine: str, manager: Any) -> Read:
    """Return what asks the servers of verl's ``LLMServerManager``."""
    if engine == "hf_cpu":
        return lambda: _ask_actors(manager)
    return lambda: _ask_endpoints(manager.server_addresses, COUNTERS[engine])


def _ask_actors(manager: Any) -> dict[str, Reading | None]:
    import ray
    from ray.exceptions import RayError

    found: dict[str, Reading | None] = {}
    pending = [
        (name, handle, handle.get_stats.remote(reset_peak=True))
        for name, handle in zip(manager.server_addresses, manager.server_handles, strict=True)
    ]
    for name, handle, answer in pending:
        try:
            stats = ray.get(answer, timeout=PATIENCE_SECONDS)
        except RayError as error:
            logger.warning("rl-accel: tp_replan: %s does not answer: %s", name, str(error).splitlines()[:1])
            found[name] = None
        else:
            share = None if stats.kv_peak_share is None else min(1.0, stats.kv_peak_share)
            found[name] = Reading(stats.preemptions, handle._actor_id.hex(), share)
    return found


_warned: set[str] = set()


def _ask_endpoints(addresses: Sequence[str], names: Sequence[str]) -> dict[str, Reading | None]:
    with ThreadPoolExecutor(max_workers=max(1, min(16, len(addresses)))) as pool:
        return dict(zip(addresses, pool.map(lambda address: _ask_endpoint(address, names), addresses), strict=True))


def _ask_endpoint(address: str, names: Sequence[str]) -> Reading | None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # servers are within the cluster
    try:
        with direct.open(f"http://{address}/metrics", timeout=PATIENCE_SECONDS) as answer:
            found = parse(answer.read().decode(errors="replace"), names)
        problem = f"has no {names[0]}"
    except (OSError, ValueError) as error:
        found, problem = None, str(error)
    if found is None and address not in _warned:
        _warned.add(address)
        logger.warning("rl-accel: tp_replan: preemptions are unknown, %s/metrics: %s", address, problem)
    return found


def parse(text: str, names: Sequence[str]) -> Reading | None:
    """Return the first of the counters ``names`` that is in ``text`` (Prometheus), added up over labels; None if there is none."""
    try:
        value, started = counter_in(text, names), counter_in(text, ("process_start_time_seconds",))
    except (ValueError, IndexError):
        return None
    return None if value is None or value < 0 else Reading(int(value), "" if started is None else str(started))
