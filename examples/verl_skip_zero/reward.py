"""Reward of the task, 1 or 0. A quarter of the prompts is always solved, another quarter never."""

import string
from typing import Any

KINDS = {"digits": frozenset(string.digits), "letters": frozenset(string.ascii_lowercase)}
NEEDED = (0.0, 0.6, 0.6, 1.1)
"""Smallest share of characters of the named kind that gives the reward 1. Prompt number i uses entry i modulo 4."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Returns 1 if enough characters are of the kind ``ground_truth`` ("digits", "letters"), else 0. Ignores white space and
    capitals."""
    characters = [character for character in solution_str if not (character.isspace() or character.isupper())]
    share = sum(character in KINDS[ground_truth] for character in characters) / max(len(characters), 1)
    return float(share >= NEEDED[extra_info["index"] % len(NEEDED)])
