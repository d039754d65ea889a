"""verl's agent-loop workers with what features add to them: each feature that is on adds its own part, and nothing else is there.

A feature's wiring names its part in verl's configuration with :func:`choose`. In the trainer process verl asks
:class:`AgentLoops` for a manager, whose workers are of verl's class with those parts in front.
"""

import importlib
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf, open_dict

from rl_accel.errors import refuse
from rl_accel.patches.seams import extends
from rl_accel.patches.verl.interfaces import AgentLoopManager, AgentLoopWorker
from rl_accel.patches.verl.verl_run import VerlRun

if TYPE_CHECKING:
    _Worker = AgentLoopWorker
else:
    _Worker = object  # verl's class comes after the parts

KEY = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
MANAGER, LEGACY_MANAGER = f"{__name__}.AgentLoops", f"{__name__}.LegacyAgentLoops"
"""verl's key for the manager of agent loops, and our values of it: for the V1 trainer, for all others."""

PARTS = "trainer.rl_accel_agent_loop_parts"
"""The full names of the parts, in alphabetical order."""


@extends(AgentLoopWorker)
class WorkerPart(_Worker):
    """What one feature adds to verl's agent-loop worker: a mixin that comes before verl's class.

    Attributes:
        outermost: comes before all parts that are not; else the order is alphabetical.
    """

    outermost = False

    def tokens_so_far(self) -> int | None:
        """Return how many tokens the response of the running task has, which is not complete; None if unknown."""
        return None

    @classmethod
    def attach(cls, manager: AgentLoopManager) -> None:
        """Do what the feature needs in the trainer process once ``manager`` has started its workers."""


def check(run: VerlRun, flag: str, reason: str) -> None:
    """Refuse a manager of the user's own, whose workers cannot have our parts.

    Args:
        run: the run whose configuration names the manager.
        flag: the feature's, for the message.
        reason: why the feature needs ours, for the message.

    Raises:
        ConfigError: names the key, what is wanted and what was found.
    """
    manager = run.get(KEY, "")
    if manager not in ("", MANAGER, LEGACY_MANAGER):
        refuse(flag, KEY, None, manager, reason)


def choose(run: VerlRun, part: str) -> None:
    """Add ``part`` to the agent-loop workers of ``run``, in verl's configuration. Idempotent.

    Args:
        run: has been through :func:`check`.
        part: full name of a :class:`WorkerPart`. It is imported in the trainer process, not here.
    """
    parts = sorted({*run.get(PARTS, ()), part})
    with open_dict(run.config):
        OmegaConf.update(run.config, KEY, MANAGER if run.is_v1 else LEGACY_MANAGER)
        OmegaConf.update(run.config, PARTS, parts, merge=False)


class AgentLoops:
    """What verl finds under :data:`KEY`: all it does with a manager's class is to call ``create``."""

    @staticmethod
    def create(config: Any, *args: Any, **kwargs: Any) -> Any:
        """Return verl's manager over workers with the parts that ``config`` names; the arguments are verl's."""
        return manager_class(config).create(config, *args, **kwargs)


class LegacyAgentLoops(AgentLoops):
    """The same for trainers that take the responses of a batch as a return value: all but V1."""


def manager_class(config: Any) -> Any:
    """Return a subclass of verl's manager for the trainer of ``config``, over workers of :func:`worker_class`."""
    import ray

    if _hands_over_in_transfer_queue(config):
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
    """Return verl's worker for the trainer of ``config`` with the parts that ``config`` names."""
    if _hands_over_in_transfer_queue(config):
        from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

        # verl exports the class already wrapped by @ray.remote, which cannot be subclassed.
        worker = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__
    else:
        from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

        worker = AgentLoopWorker
    return type("AgentLoopWorker", (*_parts(config), worker), {})


def _hands_over_in_transfer_queue(config: Any) -> bool:
    return bool(OmegaConf.select(config, KEY, default=None) != LEGACY_MANAGER)


def _parts(config: Any) -> list[type[WorkerPart]]:
    names = [name.rpartition(".") for name in OmegaConf.select(config, PARTS, default=())]
    parts = [getattr(importlib.import_module(module), name) for module, _, name in names]
    return sorted(parts, key=lambda part: not part.outermost)
