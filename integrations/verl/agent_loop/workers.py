"""verl's agent-loop workers and managers with the parts of our features."""

from typing import Any

import ray
from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopWorker
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from rl_accel.integrations.verl.reward_timeout.agent_loop import Marking
from rl_accel.integrations.verl.telemetry.recording import Observed, Recording

# verl exports the class already wrapped by @ray.remote, which cannot be subclassed.
_WorkerTQ: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__


class SharedAgentLoopWorker(Recording, Marking, _WorkerTQ):
    """verl's V1 worker."""


class LegacySharedAgentLoopWorker(Recording, Marking, AgentLoopWorker):
    """verl's worker for the legacy trainer."""


class SharedAgentLoopManager(Observed, AgentLoopManagerTQ):
    """verl's V1 manager over our workers."""

    worker: Any = SharedAgentLoopWorker

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(self.worker)


class LegacySharedAgentLoopManager(Observed, AgentLoopManager):
    """verl's manager for the legacy trainer over our workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.agent_loop_workers_class = ray.remote(LegacySharedAgentLoopWorker)
        super().__init__(*args, **kwargs)
