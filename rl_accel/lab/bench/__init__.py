"""Benchmarks of ``rl-accel bench``. Each benchmark checks correctness before it prints a number."""
