"""A/B runs of a real trainer: a recipe, the runner, the statistics, the report.

``rl-accel ab RECIPE --out DIR`` is the way in; :mod:`rl_accel.lab.ab.recipe` documents the recipe file.
"""
