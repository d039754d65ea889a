"""Extensions of verl's agent-loop workers: each feature that is on adds one part (a mixin), and nothing else changes.

A feature's wiring adds its part to verl's configuration with :func:`choose`. In the trainer process, verl asks
:class:`AgentLoops` for a manager. The manager's workers have a class that inherits from the parts and then from verl's class.
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
"""verl's key for the agent-loop manager, and our two values: for the V1 trainer and for all other trainers."""

PARTS = "trainer.rl_accel_agent_loop_parts"
"""Key for the full names of the parts, in alphabetical order."""


@extends(AgentLoopWorker)
class WorkerPart(_Worker):
    """Mixin with one feature's additions to verl's agent-loop worker; comes before verl's class.

    Attributes:
        outermost: the part comes before all others; the order is alphabetical otherwise.
    """

    outermost = False

    def tokens_so_far(self) -> int | None:
        """Returns the number of tokens so far in the running task's incomplete response; None if unknown."""
        return None

    @classmethod
    def attach(cls, manager: AgentLoopManager) -> None:
        """Sets up the feature in the trainer process once ``manager`` has started its workers."""


def check(run: VerlRun, flag: str, reason: str) -> None:
    """Refuses a user's agent-loop manager, whose workers cannot have our parts.

    Args:
        run: the run whose configuration names the manager.
        flag: the feature's flag, for the message.
        reason: why the feature needs our manager, for the message.

    Raises:
        ConfigError: names the key, the wanted value and the value found.
    """
    manager = run.get(KEY, "")
    if manager not in ("", MANAGER, LEGACY_MANAGER):
        refuse(flag, KEY, None, manager, reason)


def choose(run: VerlRun, part: str) -> None:
    """Adds ``part`` to the agent-loop workers of ``run``, in verl's configuration. Idempotent.

    Args:
        run: a run that has passed :func:`check`.
        part: full name of a :class:`WorkerPart`, which is imported in the trainer process, not here.
    """
    parts = sorted({*run.get(PARTS, ()), part})
    with open_dict(run.config):
        OmegaConf.update(run.config, KEY, MANAGER if run.is_v1 else LEGACY_MANAGER)
        OmegaConf.update(run.config, PARTS, parts, merge=False)


class AgentLoops:
    """Manager class named by :data:`KEY`; verl calls only its ``create``."""

    @staticmethod
    def create(config: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns verl's manager with workers that have the parts named in ``config``. The arguments are verl's."""
        return manager_class(config).create(config, *args, **kwargs)


class LegacyAgentLoops(AgentLoops):
    """Variant of :class:`AgentLoops` for trainers that get a batch's responses as a return value: all but V1."""


def manager_class(config: Any) -> Any:
    """Returns a subclass of verl's manager for the trainer of ``config``, with workers of :func:`worker_class`."""
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
    """Returns verl's worker class for the trainer of ``config``, extended by the parts named in ``config``."""
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
