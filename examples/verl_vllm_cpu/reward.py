"""Reward of the task, 1 or 0. A quarter of the prompts is always solved, another quarter never.

In the other half, the last character of a response decides. About half of all groups thus have equal rewards.
"""

import string
from typing import Any

KINDS = {"digits": frozenset(string.digits), "letters": frozenset(string.ascii_lowercase)}
SOLVED = (0.0, None, None, 1.0)
"""Reward of all responses to prompt number i: entry i modulo 4; None if the last character decides."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Returns 1.0 if a response is correct, else 0.0. ``ground_truth`` is the kind of the last character: "digits" or "letters".

    Ignores white space and capitals, with which the model marks lengths.
    """
    fixed = SOLVED[extra_info["index"] % len(SOLVED)]
    if fixed is not None:
        return fixed
    characters = [character for character in solution_str if not (character.isspace() or character.isupper())]
    return float(bool(characters) and characters[-1] in KINDS[ground_truth])
