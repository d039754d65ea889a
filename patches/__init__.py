"""Reversible replacements of framework functions. This folder has the patch engine; one subfolder per framework has the patches."""
