"""A/B runs of a real trainer: recipe, runner, statistics and report.

The command is ``rl-accel ab RECIPE --out DIR``; :mod:`rl_accel.lab.ab.recipe` documents the recipe file.
"""
