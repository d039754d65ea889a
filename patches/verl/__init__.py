"""Patches of verl. Each module is importable without verl and lists its patches in ``SWITCHES``."""
