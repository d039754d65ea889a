"""Patches of verl. Each module can be imported without verl, and lists its patches in the tuple ``SWITCHES``."""
