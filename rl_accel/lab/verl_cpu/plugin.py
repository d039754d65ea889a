"""Registers the CPU platform when verl imports this module, with ``VERL_USE_EXTERNAL_MODULES=rl_accel.lab.verl_cpu.plugin``."""

from rl_accel.lab import verl_cpu

verl_cpu.activate()
