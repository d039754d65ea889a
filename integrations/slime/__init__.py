"""slime: functions for its flags, each loadable by its dotted path. Which, :mod:`.custom_config` says."""
