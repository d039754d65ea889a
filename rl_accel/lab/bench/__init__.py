"""``rl-accel bench``: kernels and schedules timed side by side; each checks correctness before it prints a number."""
