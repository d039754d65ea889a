"""What the features of the pack would bring on a cluster: ``rl-accel plan``."""
