"""What ``VERL_USE_EXTERNAL_MODULES=rl_accel.lab.verl_cpu.plugin`` has verl import: it registers the CPU platform."""

from rl_accel.lab import verl_cpu

verl_cpu.activate()
