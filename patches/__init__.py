"""Reversible replacements of framework functions: the patch engine here, the patches in one folder per framework."""
