"""Extensions of verl's agent-loop workers. Each enabled feature adds one mixin class (a part), and nothing else changes.

The wiring of a feature adds the feature's mixin to verl's configuration with :func:`choose`. In the trainer process, verl asks
:class:`AgentLoops` for an agent-loop manager. Its workers have a class that inherits from the mixins, and then from verl's worker.
"""

import pkgutil
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from rl_accel.errors import refuse
from rl_accel.patches.verl.interfaces import AgentLoopManager, AgentLoopWorker
from rl_accel.patches.verl.verl_run import VerlRun

if TYPE_CHECKING:
    _Worker = AgentLoopWorker
else:
    _Worker = object  # verl's class comes after the mixins

KEY = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
MANAGER, LEGACY_MANAGER = f"{__name__}.AgentLoops", f"{__name__}.LegacyAgentLoops"
"""Agent-loop manager classes that rl-accel enters in verl's configuration: for the V1 trainer, and for all other trainers."""

PARTS = "trainer.rl_accel_agent_loop_parts"
"""Configuration key for the full names of the enabled :class:`WorkerPart` mixins, in alphabetical order."""


class WorkerPart(_Worker):
    """Mixin through which one feature extends verl's agent-loop worker, which generates responses."""

    outermost = False  # True places this mixin before all others; the order is alphabetical otherwise

    def tokens_so_far(self) -> int | None:
        """Returns the number of tokens that the current asyncio task has generated so far for its response; None if unknown."""
        return None

    @classmethod
    def attach(cls, manager: AgentLoopManager) -> None:
        """Sets up the mixin's feature in the trainer process. Called when the workers of ``manager`` have started."""


def check(run: VerlRun, flag: str, reason: str) -> None:
    """Raises ConfigError if an agent-loop manager of the user is configured. rl-accel cannot extend its workers.

    The message names ``flag`` (of the feature) and ``reason`` (why the feature needs a mixin).
    """
    manager = run.get(KEY, "")
    if manager not in ("", MANAGER, LEGACY_MANAGER):
        refuse(flag, KEY, None, manager, reason)


def choose(run: VerlRun, part: str) -> None:
    """Adds ``part``, the full name of a :class:`WorkerPart`, to the agent-loop workers in verl's configuration. Idempotent."""
    run.set(KEY, MANAGER if run.is_v1 else LEGACY_MANAGER)
    run.set(PARTS, sorted({*run.get(PARTS, ()), part}))


class AgentLoops:
    """Class that verl's configuration names as agent-loop manager for the V1 trainer, in place of verl's own class."""

    @staticmethod
    def create(config: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns verl's own agent-loop manager, whose workers have the mixins named in ``config``. Called by verl."""
        return manager_class(config).create(config, *args, **kwargs)


class LegacyAgentLoops(AgentLoops):
    """Like :class:`AgentLoops`, for all trainers except V1, which have another manager class in verl (:func:`manager_class`)."""


def manager_class(config: Any) -> Any:
    """Returns a subclass of verl's agent-loop manager for the trainer of ``config``, with workers of :func:`worker_class`."""
    import ray

    if _is_v1(config):
        from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ as VerlManager
    else:
        from verl.experimental.agent_loop.agent_loop import AgentLoopManager as VerlManager
    worker = worker_class(config)

    class Manager(VerlManager):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.agent_loop_workers_class = ray.remote(worker)

        async def _init_agent_loop_workers(self) -> None:
            await super()._init_agent_loop_workers()
            for part in _parts(config):
                part.attach(self)

    return Manager


def worker_class(config: Any) -> Any:
    """Returns a subclass of verl's agent-loop worker for the trainer of ``config``, with the mixins named in ``config``."""
    if _is_v1(config):
        from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

        # verl exports this class wrapped by @ray.remote, and a wrapped class cannot be subclassed.
        worker = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__
    else:
        from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

        worker = AgentLoopWorker
    return type("AgentLoopWorker", (*_parts(config), worker), {})


def _is_v1(config: Any) -> bool:
    return bool(OmegaConf.select(config, KEY) != LEGACY_MANAGER)


def _parts(config: Any) -> list[type[WorkerPart]]:
    parts: Any = map(pkgutil.resolve_name, OmegaConf.select(config, PARTS, default=()))
    return sorted(parts, key=lambda part: not part.outermost)
