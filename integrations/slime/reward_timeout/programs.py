"""Parsers for code rewards: the program in a response, and the test cases in a sample's metadata."""

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
    """Returns the test cases in ``{"inputs": [...], "outputs": [...]}`` (or the same as JSON), and code to append to the program.

    An input is the program's standard input, an output the expected standard output; both are text or lists of lines.
    With ``fn_name``, an input is the list of the function's arguments and an output the expected return value. Inputs may be text
    with one argument as JSON per line; text outputs are then JSON too. The function may be a method of a class ``Solution``.

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
