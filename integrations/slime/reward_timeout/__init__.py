"""Rewards within adaptive time limits on slime: functions named in the YAML that ``rl-accel slime-config`` writes."""

JUDGE = "rl_accel.integrations.slime.reward_timeout.judging.judge"
MARK = "rl_accel.integrations.slime.reward_timeout.evaluation.mark"
