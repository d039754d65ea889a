"""Reward of the task: the share of a response's characters that are of the kind named in the prompt."""

import string
from typing import Any

KINDS = {"digits": frozenset(string.digits), "letters": frozenset(string.ascii_lowercase)}


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Returns a score in [0, 1] for a response. ``ground_truth`` is the kind of characters to count: "digits" or "letters".

    White space and capitals (the marks of ``published_lengths.py``) are ignored.

    Raises:
        ValueError: ``ground_truth`` is not a kind of this task.
    """
    if ground_truth not in KINDS:
        raise ValueError(f"ground_truth wants one of {', '.join(KINDS)}, found {ground_truth!r}")
    characters = [character for character in solution_str if not (character.isspace() or character.isupper())]
    if not characters:
        return 0.0
    return sum(character in KINDS[ground_truth] for character in characters) / len(characters)
