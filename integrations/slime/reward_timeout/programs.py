"""Parsers for code rewards. They extract the program from a response, and the test cases from the metadata of a sample."""

import json
import re
from typing import Any

from rl_accel.reward.sandbox import Case

_BLOCK = re.compile(r"```[ \t]*([A-Za-z0-9_+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = ("python", "python3", "py")


def program_of(response: str) -> str | None:
    """Returns the last Python code block of a response, else the last code block without a language, else None."""
    blocks = _BLOCK.findall(response)
    for languages in (_PYTHON, ("",)):
        programs = [code for language, code in blocks if language.lower() in languages]
        if programs:
            return str(programs[-1])
    return None


_METHOD = """

if {name!r} not in globals() and "Solution" in globals():
    {name} = getattr(Solution(), {name!r})
"""


def cases_of(tests: Any) -> tuple[list[Case], str]:
    """Parses test cases: a mapping ``{"inputs": [...], "outputs": [...]}``, or this mapping as JSON text.

    Without the key ``fn_name``, an input is the program's standard input and an output is the expected standard output. Both are
    text or lists of lines.

    With the key ``fn_name``, the program defines a function of this name, perhaps as a method of a class ``Solution``. An input is
    the list of the function's arguments, or text with one argument as JSON per line. An output is the expected return value, or its
    JSON if the input is text.

    Returns the test cases, and code to append to the program, which makes a method of ``Solution`` available as a function.

    Raises:
        ValueError: ``tests`` has another form.
    """
    try:
        tests = json.loads(tests) if isinstance(tests, str) else tests
        pairs, name = list(zip(tests["inputs"], tests["outputs"], strict=True)), tests.get("fn_name")
        if not pairs:
            raise ValueError("there is none")
        if name is None:
            return [Case("stdin", _text(given), _text(wanted)) for given, wanted in pairs], ""
        if not str(name).isidentifier():
            raise ValueError(f"fn_name {name!r} is no function's name")
        return [_call(str(name), given, wanted) for given, wanted in pairs], _METHOD.format(name=str(name))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"test_cases wants as many inputs as outputs ({error!r}), found {str(tests)[:100]}") from error


def _call(name: str, given: Any, wanted: Any) -> Case:
    if isinstance(given, str):
        arguments = [json.loads(line) for line in given.split("\n") if line.strip()]
        expected = wanted if isinstance(wanted, str) else json.dumps(wanted)
    else:
        arguments, expected = list(given), json.dumps(wanted)
    return Case("call", json.dumps([name, arguments]), expected)


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
