"""Tail batching on verl's V1 trainer: ``+rl_accel.tail_batching.enable=True`` on a recipe of trainer mode ``sync``.

Only official extension points: a trainer mode, a part of agent-loop workers and an LLM client. ``wiring`` chooses them in the
configuration and registers the trainer; ``trainer`` drives the core in the trainer process, through the workers and servers of
``actors``; ``agent_loop`` and ``client`` start, cancel and settle responses in the agent-loop workers.
"""

MODE = "tail_batching"
"""The value of ``trainer.v1.trainer_mode``."""

WORKER_PART = "rl_accel.integrations.verl.tail_batching.agent_loop.TailAgentLoopWorker"
"""What this feature adds to agent-loop workers."""
