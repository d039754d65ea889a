"""Adaptive time limits for rewards on verl: ``+rl_accel.reward_timeout.enable=True``.

Only official seams: a reward manager and a part of agent-loop workers, both chosen by ``wiring`` in the configuration. In a reward
worker ``manager`` holds the reward manager that was configured and gives it a function of ours to score with, which runs the
user's function, or verl's own (``code_rewards``), within limits. In an agent-loop worker ``agent_loop`` tells validation from
training, and goes on without a reward worker that dies.
"""

MANAGER = "RewardTimeoutManager"
MANAGER_MODULE = "pkg://rl_accel.integrations.verl.reward_timeout.manager"
"""The values of ``reward.reward_manager.name`` and ``.module.path``."""

SECTION = "reward_timeout"
"""What every process finds under ``reward`` in verl's configuration: the flags, the manager that is held, where anchors go."""

VALIDATION = "__rl_accel_validation__"
"""The column that marks a response of a validation on its way to a reward worker. Nobody else sees it."""

WORKER_PART = "rl_accel.integrations.verl.reward_timeout.agent_loop.Marking"
"""What this feature adds to agent-loop workers."""
