"""Adapters for slime: functions of rl-accel that slime's flags name by dotted path. :mod:`.custom_config` lists these flags."""
