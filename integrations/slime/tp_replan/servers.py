"""What the SGLang servers behind slime's router say of their preemptions, which SGLang calls retractions."""

import json
import logging
from collections.abc import Callable
from typing import Any

from rl_accel.telemetry.server_counters import COUNTERS, Read, Reading, ask_endpoints, fetch

logger = logging.getLogger("rl_accel")


def reader(args: Any) -> Read:
    """Return what asks every worker of the router for its counter. slime has all its engines show their metrics."""
    workers = _workers_of(args)

    def read() -> dict[str, Reading | None]:
        return ask_endpoints(workers(), COUNTERS["sglang"])

    return read


def _workers_of(args: Any) -> Callable[[], dict[str, str]]:
    """Lists addresses by id and address: a server that was started anew is registered with the router anew."""
    router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/workers"
    silent = False

    def workers() -> dict[str, str]:
        nonlocal silent
        try:
            found = json.loads(fetch(router))["workers"]
            return {f"{worker.get('id', '')} {worker['url']}": worker["url"].rstrip("/") for worker in found}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if not silent:
                logger.warning("rl-accel: preemptions are unknown, %s: %r", router, error)
            silent = True
            return {}

    return workers
