"""Capabilities of verl's inference engines that rl_accel's features depend on. :func:`register` adds another engine."""

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from packaging.version import Version

from rl_accel.patches.verl.verl_run import ROLLOUT
from rl_accel.telemetry.server_counters import COUNTERS, Reading, ask_endpoints

logger = logging.getLogger("rl_accel")

T = TypeVar("T")

ReadCounters = Callable[[Sequence[str]], Mapping[str, Reading | None]]
"""Function that reads the preemption counters of rollout servers, by the names that the servers have in verl's load balancer. The
counter of a server that reports none is None."""


@dataclass(frozen=True)
class EngineSupport:
    """Capabilities of an inference engine and its rollout servers in verl. The defaults are safe for any engine.

    Functions that take ``server`` are called in the process of that rollout server.

    Attributes:
        aborts_by_id: True if a server's method ``abort_request`` works. A request's ``generate`` then returns the tokens so far.
        restarts_in_run: True if a dead server can be restarted during a run, after the training workers have dropped their handles
            of that server.
        death_errors: class names of exceptions with which a living server reports that its engine is dead.
        read_counters: function that reads the servers' preemption counters; None if unsupported.
        abort: function ``abort(server, request_id)`` that ends a cancelled request if ``aborts_by_id`` is False. Returns False if
            the caller must cancel the remote ``generate`` call instead. None if unsupported.
        pause: function ``pause(server)`` that ends all requests and holds back later ones until ``resume_generation``, called for a
            replica's first server. None: verl's ``abort_all_requests`` is used.
        counting: key and value in verl's configuration that make the servers count preemptions; None if servers always count.
    """

    aborts_by_id: bool = False
    restarts_in_run: bool = False
    death_errors: tuple[str, ...] = ()
    read_counters: ReadCounters | None = None
    abort: Callable[[Any, str], bool] | None = None
    pause: Callable[[Any], None] | None = None
    counting: tuple[str, Any] | None = None


def _from_endpoints(engine: str) -> ReadCounters:
    return lambda servers: ask_endpoints({server: f"http://{server}" for server in servers}, COUNTERS[engine])


# The functions below are called with __ray_call__, which Ray runs in another thread than that of the engine's event loop.


def _in_loop_of(task: Any, work: Coroutine[Any, Any, T]) -> Future[T]:
    """Starts ``work`` in the event loop of ``task``, from another thread. Returns a future of the result."""
    return asyncio.run_coroutine_threadsafe(work, task.get_loop())


def _pause_vllm(server: Any) -> None:
    """Runs verl's ``abort_all_requests``, also with versions of vLLM that lack an argument that verl uses."""
    engine = server.engine
    pause = engine.pause_generation
    # verl 0.9.1 passes this argument as False. vLLM 0.32 has no such argument, and never waits by default.
    if "wait_for_inflight_requests" not in inspect.signature(pause).parameters:
        engine.pause_generation = lambda wait_for_inflight_requests=False, **options: pause(**options)
    _in_loop_of(engine.output_handler, server.abort_all_requests()).result()


def _lacks(manager: Any) -> bool:
    """Returns True if SGLang's tokenizer ``manager`` lacks an attribute that the functions of this module need."""
    names = ("is_pause", "is_pause_cond", "model_update_lock", "rid_to_state")
    return not all(hasattr(manager, name) for name in names)


def _abort_in_sglang(server: Any, request_id: str) -> bool:
    manager = server.tokenizer_manager

    async def abort() -> bool:
        if _lacks(manager) or manager.is_pause or request_id not in manager.rid_to_state:  # it may not be in the engine
            return False
        manager.abort_request(request_id)
        return True

    return _in_loop_of(server._server_task, abort()).result()


def _pause_sglang(server: Any) -> None:
    """Ends all requests and holds back later ones, like SGLang's ``pause_generation`` in mode "abort", but with less delay.

    SGLang checks once a second whether all requests have ended. This function checks at shorter intervals. If SGLang lacks an
    attribute that the function needs, verl's ``abort_all_requests`` is called instead.
    """
    manager = server.tokenizer_manager

    async def pause() -> None:
        seconds = 0.01
        async with manager.is_pause_cond:
            manager.is_pause = True
            while True:
                running = await manager.model_update_lock.is_locked()
                manager.abort_request(abort_all=True)  # also for requests whose caller is gone, which hold no lock
                if not running:
                    return
                await asyncio.sleep(seconds)
                seconds = min(2 * seconds, 1.0)

    _in_loop_of(server._server_task, server.abort_all_requests() if _lacks(manager) else pause()).result()


_ENGINES = {
    # No aborts_by_id: verl 0.9's abort_request looks up request ids that vLLM 0.24 no longer uses.
    "vllm": EngineSupport(
        restarts_in_run=True,
        death_errors=("EngineDeadError",),
        read_counters=_from_endpoints("vllm"),
        pause=_pause_vllm,
        counting=(f"{ROLLOUT}.disable_log_stats", False),
    ),
    "sglang": EngineSupport(
        read_counters=_from_endpoints("sglang"),
        abort=_abort_in_sglang,
        pause=_pause_sglang,
        counting=(f"{ROLLOUT}.engine_kwargs.sglang.enable_metrics", True),
    ),
}


def register(name: str, engine: EngineSupport) -> None:
    """Adds an engine, or replaces the capabilities of a known one. ``name`` is the engine's value of verl's ``rollout.name``."""
    _ENGINES[name] = engine


def engine_of(config: Any) -> EngineSupport:
    """Returns the capabilities of the engine that verl's ``config`` names; the defaults for an unknown engine."""
    return _ENGINES.get(config.actor_rollout_ref.rollout.name, EngineSupport())


def is_death(error: BaseException, engine: EngineSupport) -> bool:
    """Returns True if ``error``, raised by a remote call to a rollout server, means that the server or its ``engine`` is dead."""
    from ray.exceptions import RayActorError

    cause = getattr(error, "cause", None) or error  # Ray wraps a method's exception in a RayTaskError
    return isinstance(error, RayActorError) or type(cause).__name__ in engine.death_errors


def counted_engines() -> list[str]:
    """Returns the names of the engines whose servers' preemption counters can be read."""
    return sorted(name for name, engine in _ENGINES.items() if engine.read_counters is not None)


def read_servers(engine: EngineSupport, servers: Sequence[str]) -> Mapping[str, Reading | None]:
    """Reads the preemption counters of ``servers``, see :data:`ReadCounters`. All are None if ``engine`` has no counters."""
    return dict.fromkeys(servers) if engine.read_counters is None else engine.read_counters(servers)


@functools.cache
def version_problem(package: str, version: str | None, tried: tuple[str, ...], newest: str = "") -> str | None:
    """Returns the reason why ``version`` of an engine's ``package`` is refused; None if ``version`` is accepted.

    ``tried`` are the tested versions, oldest first. ``newest`` is the newest version that is known to have the same interface; "":
    the last tested one. A version between the first and the newest that was not tested is accepted with one warning.
    """
    if version is None:
        return "is not installed"
    found = Version(version)
    if not Version(tried[0]) <= found <= Version(newest or tried[-1]):
        age = "older" if found < Version(tried[0]) else "newer"
        return f"{version} is {age} than the versions that were tried ({', '.join(tried)})"
    if version not in tried:
        logger.warning("rl-accel: %s %s was not tried; %s were", package, version, " and ".join(tried))
    return None
