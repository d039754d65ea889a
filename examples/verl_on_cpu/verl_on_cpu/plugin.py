"""Registers the CPU platform when verl imports this module, with ``VERL_USE_EXTERNAL_MODULES=verl_on_cpu.plugin``."""

from verl_on_cpu import activate

activate()
