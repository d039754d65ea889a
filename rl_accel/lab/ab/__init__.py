"""A/B comparisons of training runs with a real trainer: recipe file, runner, statistics and report.

The command is ``rl-accel ab RECIPE --out DIR``. :mod:`rl_accel.lab.ab.recipe` documents the recipe file.
"""
