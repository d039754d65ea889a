"""What a process of a worker executes, a program on a test case or a grader, and what the worker makes of its report."""

import copyreg
import importlib
import importlib.util
import io
import json
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any

from . import dumps

Grader = Callable[..., Any]
REPORT_BYTES = 1 << 16
"""The most of a report but for the value: a verdict and a few words."""


def run_program(code: str, case: dict[str, str]) -> bytes:
    """Return the report of a program on a case, as JSON: its ``verdict`` and the ``reason``."""
    verdict, reason = "passed", ""
    try:
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8", errors="surrogateescape")
        namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
        exec(compile(code, "solution.py", "exec"), namespace)
        if case["kind"] == "call":
            verdict, reason = _call(namespace, case)
    except SystemExit as error:
        if case["kind"] != "stdin" or error.code not in (None, 0):
            verdict, reason = "error", f"SystemExit: {error.code}"
    except MemoryError:
        verdict, reason = "memory", "MemoryError"
    except BaseException as error:
        verdict, reason = "error", _describe(error)
    return json.dumps({"verdict": verdict, "reason": reason[:500]}).encode()


def _call(namespace: dict[str, Any], case: dict[str, str]) -> tuple[str, str]:
    name, arguments = json.loads(case["given"])
    if not callable(namespace.get(name)):
        return "error", f"there is no function {name}"
    value = json.loads(json.dumps(namespace[name](*arguments)))
    return ("passed", "") if value == json.loads(case["expected"]) else ("wrong", f"found {value!r}"[:200])


def verdict_of(
    stopped: str, status: int, report: bytes, printed: str, case: dict[str, str], grader: Grader | None
) -> tuple[str, str, bytes]:
    """Return the verdict on an execution, the reason, and the pickled value of a grader.

    Args:
        stopped, status: the limit that stopped it, or "" and its status.
        report: what :func:`run_program` or :func:`grade` returned, or what untrusted code has written in its place.
        printed: what it printed.
        case: of the program.
        grader: None for a program.
    """
    if stopped:
        verdicts = {"wall": "timeout", "cpu": "timeout", "memory": "memory"}
        return verdicts.get(stopped, "killed"), f"{stopped} limit", b""
    line, _, value = report.partition(b"\n")
    try:
        head = json.loads(line[:REPORT_BYTES])
        verdict, reason = head["verdict"], str(head["reason"])
    except (ValueError, KeyError, TypeError, RecursionError):
        ending = f"ended with status {os.WEXITSTATUS(status)} before its case was judged"
        if os.WIFSIGNALED(status):
            ending = f"ended by signal {os.WTERMSIG(status)}"
        return "error" if grader is None else "killed", ending, b""
    if verdict not in (("passed", "wrong", "error", "memory") if grader is None else ("done", "error")):
        return "error", "it wrote a report of its own", b""
    if verdict == "passed" and case["kind"] == "stdin" and _lines(printed) != _lines(case["expected"]):
        return "wrong", "other output", b""
    return verdict, reason, value


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def find_grader(target: str, arguments: dict[str, Any] | None) -> Grader:
    """Return the function that ``target`` names, "module:function" or "/path/file.py:function".

    Args:
        target: with ``arguments`` it is called once with them, and what it returns is the function.

    Raises:
        BaseException: whatever its import or its call raises; TypeError if it is no function.
    """
    module, _, name = target.rpartition(":")
    function: Any = _load(module) if module.endswith(".py") else importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    if arguments is not None:
        function = function(**arguments)
    if not callable(function):
        raise TypeError(f"{target} must be a function, found {function!r}")
    grader: Grader = function
    return grader


def _load(path: str) -> Any:
    """Execute a file as a module that has no place in ``sys.modules``: a file may be called like a package that it imports."""
    spec = importlib.util.spec_from_file_location(f"grader_{abs(hash(path))}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def grade(grader: Grader, payload: bytes, plain: bool) -> tuple[dict[str, str], bytes]:
    """Return the report of one call: ``verdict`` and ``reason``, and the pickled value, or the exception unless ``plain``.

    Args:
        grader: the function.
        payload: its keyword arguments, pickled.
        plain: reduce the value to types that can be unpickled without trust in who wrote them.
    """
    try:
        value = grader(**pickle.loads(payload))
        body = pickle.dumps(_plain(value), pickle.HIGHEST_PROTOCOL) if plain else dumps(value)
        head = {"verdict": "done", "reason": ""}
    except BaseException as error:
        body = b"" if plain else _pickled(error)
        head = {"verdict": "error", "reason": _describe(error)}
    return head, body


def _pickled(error: BaseException) -> bytes:
    """The exception, with its traceback as a note; an Exception of the same text for one that would end the trainer's thread."""
    try:
        trace = "".join(traceback.format_exception(error))
        if not isinstance(error, Exception):
            error = RuntimeError(_describe(error))
        error.add_note(f"In the process of the grader:\n{trace}")
        if not _is_picklable(error):  # its constructor wants other arguments than it keeps, or it holds a lock, say
            copyreg.pickle(type(error), _without_constructor)
        if _is_picklable(error):
            return dumps(error)
    except BaseException:
        pass  # it cannot even be described
    return dumps(RuntimeError(_describe(error)))


def _without_constructor(error: Exception) -> Any:
    state = {name: value for name, value in vars(error).items() if _is_picklable(value)}
    return copyreg.__newobj__, (type(error), *filter(_is_picklable, error.args)), state  # type: ignore[attr-defined]


def _is_picklable(value: Any) -> bool:
    try:
        pickle.loads(dumps(value))
    except Exception:
        return False
    return True


def _plain(value: Any) -> Any:
    """The value of numbers, text, bytes, lists, tuples, sets and dicts; arrays become lists, their scalars numbers.

    Raises:
        TypeError: there is something else in it.
    """
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    if isinstance(value, dict):
        return {_plain(key): _plain(part) for key, part in value.items()}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return kind(_plain(part) for part in value)
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    for base in (int, float, str):
        if isinstance(value, base):  # an enum's member, say
            return base(value)
    raise TypeError(f"an isolated grader returns numbers, text, lists and dicts, found {type(value).__name__}")


def problem_of(error: BaseException) -> str:
    """Return what an import raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
    return f"{_describe(error)}{place}"


def _describe(error: BaseException) -> str:
    """The error's type and text, at most 500 characters."""
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except BaseException:  # an exception whose text raises
        return type(error).__name__
