"""Reversible replacements of framework functions: the engine here, one patch a file under the framework's folder."""
