"""Command ``rl-accel plan``: simulates how much each feature of rl-accel would shorten the steps of a given run."""
