"""Tools that measure and test rl-accel. The features of rl-accel do not use these tools.

``ab`` trains the variants ("arms") of a recipe and reports how their results differ. ``bench`` measures the speed of kernels and
schedules. ``cpu_engine`` generates text with a small model on a CPU. ``verl_cpu`` lets the real verl train without an accelerator.
The rest of rl_accel must not import this package (an import contract enforces this). The command line looks up commands by name.
"""
