"""Integration with verl: the plug-in module that verl imports, and the adapters that connect rl_accel's features to verl."""
