"""The counters of verl's rollout servers: vLLM's and SGLang's over HTTP, the CPU engine's from its actor."""

import logging
from collections.abc import Sequence

import ray
from ray.exceptions import RayError

from rl_accel.telemetry.server_counters import COUNTERS, PATIENCE_SECONDS, Reading, ask_endpoints

logger = logging.getLogger("rl_accel")


def read_servers(engine: str, servers: Sequence[str], reset_peak: bool = False) -> dict[str, Reading | None]:
    """Ask every server, at once. None: it does not say, or nobody knows how to ask this engine.

    Args:
        engine: ``rollout.name``.
        servers: ``host:port`` of vLLM or SGLang, the names of the CPU engine's actors.
        reset_peak: have the CPU engine's ``kv_use`` begin anew.
    """
    if engine == "hf_cpu":
        return _ask_actors(servers, reset_peak)
    if engine not in COUNTERS:
        return dict.fromkeys(servers)
    return ask_endpoints({server: f"http://{server}" for server in servers}, COUNTERS[engine])


def _ask_actors(servers: Sequence[str], reset_peak: bool) -> dict[str, Reading | None]:
    pending = {}
    found: dict[str, Reading | None] = dict.fromkeys(servers)
    for server in servers:
        try:
            handle = ray.get_actor(server)
        except ValueError as error:
            _complain(server, error)
        else:
            pending[server] = handle, handle.get_stats.remote(reset_peak=reset_peak)
    for server, (handle, answer) in pending.items():
        try:
            stats = ray.get(answer, timeout=PATIENCE_SECONDS)
        except RayError as error:
            _complain(server, error)
        else:
            share = None if stats.kv_peak_share is None else min(1.0, stats.kv_peak_share)
            found[server] = Reading(stats.preemptions, handle._actor_id.hex(), share)
    return found


def _complain(server: str, error: Exception) -> None:
    logger.warning("rl-accel: preemptions are unknown, %s does not answer: %s", server, str(error).splitlines()[:1])
