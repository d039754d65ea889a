"""Preemptions of a step on verl: the counters of the servers of its ``LLMServerManager``."""

import logging
from typing import Any

from rl_accel.telemetry.server_counters import (
    COUNTERS,
    PATIENCE_SECONDS,
    Read,
    Reading,
    ask_endpoints,
)

logger = logging.getLogger("rl_accel")


def reader(engine: str, manager: Any) -> Read:
    """Return what asks the servers of verl's ``LLMServerManager``."""
    if engine == "hf_cpu":
        return lambda: _ask_actors(manager)

    def read() -> dict[str, Reading | None]:
        urls = {address: f"http://{address}" for address in manager.server_addresses}
        return ask_endpoints(urls, COUNTERS[engine])

    return read


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
