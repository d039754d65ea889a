"""Example of a user's grader: runs a program made of the response in a separate process. Some of these programs never end."""

import subprocess
import sys
from typing import Any

PROGRAM = """
import string, zlib
answer, kind = {answer!r}, {kind!r}
wanted = string.digits if kind == "digits" else string.ascii_lowercase
while answer and zlib.crc32(answer.encode()) % {one_in} == 0:
    pass
print(sum(character in wanted for character in answer) / max(len(answer), 1))
"""
ONE_IN = 24
"""One of this many answers never ends, on average and whatever the model learns: 4%, about as published for generated code."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Any = None,
    seconds: float = 12.0,
    one_in: int = ONE_IN,
    **_: Any,
) -> float:
    """Returns the share of the response's characters that are of the named kind; 0 if the program takes over ``seconds``."""
    program = PROGRAM.format(answer=solution_str.strip(), kind=ground_truth, one_in=one_in)
    try:
        done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return 0.0
    return float(done.stdout) if done.returncode == 0 else 0.0
