"""The reward of the task: the share of the response's characters that are of the kind the prompt names, if it is long enough."""

import string
from typing import Any

ENOUGH = 24
"""Characters from which on the length no longer matters; a shorter response scores proportionally less."""
KINDS = {"digits": frozenset(string.digits), "letters": frozenset(string.ascii_lowercase)}


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Return a score in [0, 1]; ``ground_truth`` is the name of the kind. White space does not count.

    Raises:
        ValueError: ``ground_truth`` is not a kind of this task.
    """
    if ground_truth not in KINDS:
        raise ValueError(f"ground_truth wants one of {', '.join(KINDS)}, found {ground_truth!r}")
    characters = [character for character in solution_str if not character.isspace()]
    matches = sum(character in KINDS[ground_truth] for character in characters)
    return matches / max(len(characters), ENOUGH)
