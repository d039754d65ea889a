"""What features need to know of the engines that verl generates with. Whoever adds an engine to verl registers its facts here."""

from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError


@dataclass(frozen=True)
class Engine:
    """An engine, by what its servers can do. The defaults are safe for any.

    Attributes:
        aborts_by_id: ``abort_request`` of its servers works, and ``generate`` then returns the tokens so far.
        restarts_in_run: a server that is started anew gets the next weights. Else the training side holds on to the first one.
        death_errors: names of exceptions with which a living server says that the engine behind it is dead.
    """

    aborts_by_id: bool = False
    restarts_in_run: bool = False
    death_errors: tuple[str, ...] = ()

    def is_dead(self, error: BaseException) -> bool:
        """Whether ``error`` of a remote call says that a server, or the engine behind it, is gone for good."""
        cause = getattr(error, "cause", None) or error  # what a method raised comes wrapped in a RayTaskError
        return isinstance(error, RayActorError) or type(cause).__name__ in self.death_errors


_ENGINES = {
    # vLLM's abort_request, as verl 0.9 calls it, looks up ids that vLLM 0.24 no longer uses.
    "vllm": Engine(death_errors=("EngineDeadError",)),
}


def register(name: str, engine: Engine) -> None:
    """Add an engine, or change what is known of one. ``name`` is the value of ``rollout.name``."""
    _ENGINES[name] = engine


def engine_of(config: Any) -> Engine:
    """Return the engine that ``config``, verl's, generates with."""
    return _ENGINES.get(config.actor_rollout_ref.rollout.name, Engine())
