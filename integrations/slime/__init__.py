"""slime: functions for its flags, each loadable by its dotted path. So far the advantages; nothing of the rollout yet."""
