"""A/B runs of a real trainer: a recipe, the runner, the statistics, the report.

``rl-accel ab RECIPE --out DIR`` is the way in; :mod:`rl_accel.compare.recipe` documents the recipe file.
"""
