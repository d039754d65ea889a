"""Patches of slime. Each module is importable without slime and lists its patches in ``SWITCHES``."""
