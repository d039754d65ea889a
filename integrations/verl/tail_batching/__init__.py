"""Tail batching on verl's V1 trainer: ``+rl_accel.tail_batching.enable=True`` on a recipe of trainer mode ``sync``.

Only official extension points: a trainer mode, a part of agent-loop workers and an LLM client. ``wiring`` chooses them in the
configuration and registers the trainer; ``trainer`` drives the core in the trainer process; ``agent_loop`` has the workers that
start, cancel and settle responses; ``servers`` is what they generate with.
"""
