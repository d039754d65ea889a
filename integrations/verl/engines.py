"""Capabilities of verl's inference engines, as far as features need them. :func:`register` adds another engine."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rl_accel.telemetry.server_counters import COUNTERS, Reading, ask_endpoints

ReadCounters = Callable[[Sequence[str]], Mapping[str, Reading | None]]
"""Reads the preemption counters of servers, named as in verl's load balancer; None for a server that reports none."""


@dataclass(frozen=True)
class Engine:
    """Capabilities of an engine's servers. The defaults are safe for any engine.

    Attributes:
        aborts_by_id: the servers' ``abort_request`` works, and ``generate`` then returns the tokens so far.
        restarts_in_run: a restarted server gets the next weights, once the training workers have dropped the old server's handle.
        death_errors: names of exceptions by which a living server reports that its engine is dead.
        read_counters: reads the servers' preemption counters; None if unsupported.
        stop: ``stop(server, request_id)``, called in the server's process, ends one request, whose ``generate`` then returns the
            tokens so far; None if unsupported.
        cache_tokens: ``cache_tokens(server)``, called in the server's process, returns the capacity of the server's key-value
            cache in tokens, or None if unknown.
        seeds_by_position: a request with a seed draws the same tokens after a migration.
        counting: key of verl's configuration and its value that make servers count preemptions; None if they always do.
    """

    aborts_by_id: bool = False
    restarts_in_run: bool = False
    death_errors: tuple[str, ...] = ()
    read_counters: ReadCounters | None = None
    stop: Callable[[Any, str], None] | None = None
    cache_tokens: Callable[[Any], int | None] = lambda _server: None
    seeds_by_position: bool = False
    counting: tuple[str, Any] | None = None


def _from_endpoints(engine: str) -> ReadCounters:
    return lambda servers: ask_endpoints({server: f"http://{server}" for server in servers}, COUNTERS[engine])


def _cache_of_vllm(server: Any) -> int | None:
    config = server.engine.vllm_config
    blocks = config.cache_config.num_gpu_blocks or 0
    return int(blocks * config.cache_config.block_size * config.parallel_config.data_parallel_size) or None


def _stop_in_vllm(server: Any, request_id: str) -> None:
    """Aborts a request of vLLM. Ray calls this outside the thread of vLLM's event loop."""
    engine = server.engine
    stopped = asyncio.run_coroutine_threadsafe(engine.abort(request_id), engine.output_handler.get_loop())
    stopped.add_done_callback(Future.result)  # logs an exception of the abort, which nobody awaits


_ROLLOUT = "actor_rollout_ref.rollout"
_ENGINES = {
    # No aborts_by_id: verl 0.9's abort_request looks up request ids that vLLM 0.24 no longer uses.
    "vllm": Engine(
        restarts_in_run=True,
        death_errors=("EngineDeadError",),
        read_counters=_from_endpoints("vllm"),
        stop=_stop_in_vllm,
        cache_tokens=_cache_of_vllm,
        counting=(f"{_ROLLOUT}.disable_log_stats", False),
    ),
    "sglang": Engine(
        read_counters=_from_endpoints("sglang"),
        counting=(f"{_ROLLOUT}.engine_kwargs.sglang.enable_metrics", True),
    ),
}


def register(name: str, engine: Engine) -> None:
    """Adds an engine or replaces its capabilities. ``name`` is the value of ``rollout.name``."""
    _ENGINES[name] = engine


def engine_of(config: Any) -> Engine:
    """Returns the engine that verl's ``config`` names; defaults if unknown."""
    return _ENGINES.get(config.actor_rollout_ref.rollout.name, Engine())


def is_death(error: BaseException, engine: Engine) -> bool:
    """Returns whether ``error`` of a remote call means that a server or its engine is dead."""
    from ray.exceptions import RayActorError

    cause = getattr(error, "cause", None) or error  # Ray wraps a method's exception in a RayTaskError
    return isinstance(error, RayActorError) or type(cause).__name__ in engine.death_errors


def counted_engines() -> list[str]:
    """Returns the names of engines whose preemptions can be read."""
    return sorted(name for name, engine in _ENGINES.items() if engine.read_counters is not None)


def read_servers(engine: Engine, servers: Sequence[str]) -> Mapping[str, Reading | None]:
    """Reads the counters of all ``servers`` at once; None for a server that reports none, or if unsupported."""
    return dict.fromkeys(servers) if engine.read_counters is None else engine.read_counters(servers)
