"""Tools that measure and test rl-accel, separate from the features themselves.

``ab`` trains the arms of a recipe and reports the difference, ``bench`` times kernels and schedules, ``cpu_engine``
generates with a small model on a CPU, ``verl_cpu`` lets the real verl train without an accelerator. The rest of
rl_accel has no import of this package (an import contract enforces this); the command line looks commands up by name.
"""
