"""Tail batching on verl's V1 trainer: ``+rl_accel.tail_batching.enable=True`` on a recipe of trainer mode ``sync``.

Only official seams: a trainer mode, an agent-loop manager and an LLM client. ``wiring`` chooses them in the configuration,
``mode`` registers the trainer, ``trainer`` and ``host`` drive the core in the trainer process, ``agent_loop`` and ``client``
start, cancel and settle responses in the agent-loop workers.
"""

MODE = "tail_batching"
"""The value of ``trainer.v1.trainer_mode``."""

WORKER_PART = "rl_accel.integrations.verl.tail_batching.agent_loop.TailAgentLoopWorker"
"""What this feature adds to agent-loop workers."""
