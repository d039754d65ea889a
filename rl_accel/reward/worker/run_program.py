"""Runs a program and its case in this process, and says how it went."""

import io
import json
import os
import sys
from typing import Any


def run_program(code: str, case: dict[str, Any]) -> bytes:
    """The report of the program ``code`` on ``case``, as JSON: its ``verdict`` and the ``reason``."""
    verdict, reason = "passed", ""
    try:
        verdict, reason = _verdict(code, case)
    except SystemExit as error:
        if case["kind"] != "stdin" or error.code not in (None, 0):
            verdict, reason = "error", f"SystemExit: {error.code}"
    except MemoryError:
        verdict, reason = "memory", "MemoryError"
    except BaseException as error:
        verdict, reason = "error", describe(error)
    return json.dumps({"verdict": verdict, "reason": reason[:500]}).encode()


def describe(error: BaseException) -> str:
    """The error's type and text, at most 500 characters."""
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except BaseException:  # an exception whose text raises
        return type(error).__name__


def _verdict(code: str, case: dict[str, Any]) -> tuple[str, str]:
    kind = case["kind"]
    if kind == "pytest":
        return _pytest(code, case["given"])
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8", errors="surrogateescape")
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(code, "solution.py", "exec"), space)
    if kind == "stdin":
        return "passed", ""
    if kind == "assert":
        try:
            exec(compile(case["given"], "test.py", "exec"), space)
        except AssertionError as error:
            return "wrong", describe(error)
        return "passed", ""
    name, arguments = json.loads(case["given"])
    if not callable(space.get(name)):
        return "error", f"there is no function {name}"
    found = json.loads(json.dumps(space[name](*arguments)))
    expected = json.loads(case["expected"])
    return ("passed", "") if found == expected else ("wrong", f"found {found!r}"[:200])


def _pytest(code: str, tests: str) -> tuple[str, str]:
    with open("solution.py", "w") as file:
        file.write(code)
    with open("test_solution.py", "w") as file:
        file.write(tests)
    import pytest

    sys.path.insert(0, os.getcwd())
    status = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "test_solution.py"])
    if status == 0:
        return "passed", ""
    return ("wrong", "tests failed") if status == 1 else ("error", f"pytest ended with {status!r}")
