"""Tail batching on slime: a rollout function and a data source, named in the YAML that ``rl-accel slime-config`` writes."""

ROLLOUT = "rl_accel.integrations.slime.tail_batching.rollout.generate_rollout"
DATA_SOURCE = "rl_accel.integrations.slime.tail_batching.data_source.TailDataSource"
EVAL = "slime.rollout.sglang_rollout.generate_rollout"
