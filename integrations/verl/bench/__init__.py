"""Load for verl's own parts without a model: the measuring side of ``rl-accel bench tail``."""
