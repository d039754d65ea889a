"""Rewards within adaptive time limits on slime: functions named in the YAML that ``rl-accel slime-config`` writes."""
