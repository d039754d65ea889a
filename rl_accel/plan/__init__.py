"""Simulated gain of each rl-accel feature on a cluster: ``rl-accel plan``."""
