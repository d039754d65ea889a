"""The laboratory: what measures and proves the pack, and is no part of it.

``ab`` trains the arms of a recipe and reports the difference, ``bench`` times kernels and schedules, ``cpu_engine``
generates with a small model on a CPU, ``verl_cpu`` lets the real verl train without an accelerator. The product never
imports the laboratory (enforced by an import contract); its commands are looked up by name.
"""
