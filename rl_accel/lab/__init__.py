"""Tools that measure and test rl-accel. The features of rl-accel do not use these tools.

``ab`` trains the variants ("arms") of a recipe and reports how their results differ. ``bench_gae`` measures the speed of GAE
kernels. The rest of rl_accel must not import this package (an import contract enforces this). The command line looks up commands
by name.
"""
