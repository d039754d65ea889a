"""What features need to know of the engines that verl generates with. Whoever adds an engine to verl registers its facts here."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rl_accel.telemetry.server_counters import COUNTERS, Reading, ask_endpoints

ReadCounters = Callable[[Sequence[str]], Mapping[str, Reading | None]]
"""Asks servers, named as verl's load balancer does, for their counters; None for one that does not say."""


@dataclass(frozen=True)
class Engine:
    """An engine, by what its servers can do. The defaults are safe for any.

    Attributes:
        aborts_by_id: ``abort_request`` of its servers works, and ``generate`` then returns the tokens so far.
        restarts_in_run: a server that is started anew gets the next weights, once the training side has forgotten the first one.
        death_errors: names of exceptions with which a living server says that the engine behind it is dead.
        read_counters: asks servers how often they have preempted; None: nobody knows how.
        stop: ``stop(server, request_id)``, called in a server's process, ends one request, whose ``generate`` then returns the
            tokens so far; None: nobody knows how.
        cache_tokens: ``cache_tokens(server)``, called there, returns the tokens that its key-value cache holds, None if unknown.
        seeds_by_position: a request with a seed draws the same tokens after it has gone on elsewhere.
        counting: a key of verl's configuration and the value with which servers count preemptions; None: they always do.
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
    """From the thread that Ray calls it in, which is not that of vLLM's event loop."""
    engine = server.engine
    stopped = asyncio.run_coroutine_threadsafe(engine.abort(request_id), engine.output_handler.get_loop())
    stopped.add_done_callback(Future.result)  # logs what it raised; nobody awaits it


_ROLLOUT = "actor_rollout_ref.rollout"
_ENGINES = {
    # vLLM's abort_request, as verl 0.9 calls it, looks up ids that vLLM 0.24 no longer uses.
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
    """Add an engine, or change what is known of one. ``name`` is the value of ``rollout.name``."""
    _ENGINES[name] = engine


def engine_of(config: Any) -> Engine:
    """Return the engine that ``config``, verl's, generates with."""
    return _ENGINES.get(config.actor_rollout_ref.rollout.name, Engine())


def is_death(error: BaseException, engine: Engine) -> bool:
    """Whether ``error`` of a remote call says that a server, or the engine behind it, is gone for good."""
    from ray.exceptions import RayActorError

    cause = getattr(error, "cause", None) or error  # what a method raised comes wrapped in a RayTaskError
    return isinstance(error, RayActorError) or type(cause).__name__ in engine.death_errors


def counted_engines() -> list[str]:
    """Return the engines whose preemptions can be read."""
    return sorted(name for name, engine in _ENGINES.items() if engine.read_counters is not None)


def read_servers(engine: Engine, servers: Sequence[str]) -> Mapping[str, Reading | None]:
    """Ask all ``servers`` at once for their counters; None for one that does not say, or if nobody knows how to ask."""
    return dict.fromkeys(servers) if engine.read_counters is None else engine.read_counters(servers)
