"""Executes a program on a test case, or calls a grader, in a child process. Derives the verdict from the child's report."""

import contextlib
import copyreg
import importlib
import importlib.util
import io
import json
import logging
import os
import pickle
import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import Start, dumps

REPORT_BYTES = 1 << 16
"""Maximum size in bytes of the part of a report that holds the verdict."""
VALUE_BYTES = 1 << 20
"""Maximum size in bytes of a report with the return value of an isolated grader. A longer report stops the execution."""


@dataclass(frozen=True)
class Grader:
    """A grader as this process has imported it.

    Attributes:
        constants: keyword arguments of the grader that are the same in all calls, by name.
        random_state: state of Python's random numbers after the import. The first process that serves calls begins with this state;
            later ones use a new seed, so that they draw different numbers.
    """

    function: Callable[..., Any]
    constants: dict[str, Any]
    random_state: Any = field(default_factory=random.getstate)


def run_program(code: str, case: dict[str, str]) -> bytes:
    """Runs the program ``code`` on a test case. Returns its report: a JSON object with the keys ``verdict`` and ``reason``."""
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
    """Returns the verdict on an execution, the reason for the verdict, and the pickled return value of a grader (or b"").

    Args:
        stopped: name of the limit that stopped the execution, or "".
        status: status of the child process from ``os.waitpid``, if no limit stopped the execution.
        report: result of :func:`run_program` or :func:`grade` in the child process, or anything else that untrusted code wrote.
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


def find_grader(start: Start, payload: bytes) -> Grader:
    """Prepares this process as ``start`` (with its ``payload``) says, then imports and returns the grader.

    Raises any error of the import, and TypeError if the result is not callable.
    """
    if start.path is not None:
        sys.path[:] = start.path
    if not start.isolation:
        os.environ.update(start.environment)
        if start.logging:
            logging.basicConfig(**start.logging)
        if start.setup:
            module, _, name = start.setup.partition(":")
            getattr(importlib.import_module(module), name)(start.environment)
    module, _, name = start.target.rpartition(":")
    folder = "" if start.isolation else start.folder
    with contextlib.chdir(folder) if folder else contextlib.nullcontext():
        function: Any = _load(module) if os.path.isabs(module) else importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    arguments, constants = pickle.loads(payload)
    if arguments is not None:
        function = function(**arguments)
    if not callable(function):
        raise TypeError(f"{start.target} must be a function, found {function!r}")
    return Grader(function, constants)


def _load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"grader_{abs(hash(path))}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    # not added to sys.modules, because the file may have the name of a package that it imports
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def grade(grader: Grader, payload: bytes, plain: bool) -> tuple[dict[str, str], bytes]:
    """Calls the grader. ``payload``: pickled positional and keyword arguments, and the names of ``grader.constants`` to add.

    Returns two values: a dict with ``verdict`` and ``reason``, and pickled bytes. The bytes hold the exception, or a pair: the
    return value, and the arguments that the grader has changed. With ``plain`` (for an isolated grader), the bytes hold the return
    value as JSON (:func:`_plain`), and exceptions and changed arguments are dropped.
    """
    try:
        args, kwargs, names = pickle.loads(payload)
        given = {**dict(enumerate(args)), **kwargs}
        before = {name: dumps(item) for name, item in given.items() if isinstance(item, (dict, list)) and not plain}
        value = grader.function(*args, **kwargs, **{name: grader.constants[name] for name in names})
        if plain:
            body = json.dumps(_plain(value)).encode()
        else:
            body = dumps((value, _changes(given, before)))
        head = {"verdict": "done", "reason": ""}
    except BaseException as error:
        body = b"" if plain else _pickled(error)
        head = {"verdict": "error", "reason": _describe(error)}
    return head, body


def _changes(given: dict[Any, Any], before: dict[Any, bytes]) -> dict[Any, Any]:
    """Returns the arguments in ``given`` that differ from their pickled copies in ``before``."""
    changed = {}
    for name, data in before.items():
        with contextlib.suppress(Exception):  # the grader has added something that cannot be pickled
            if dumps(given[name]) != data:
                changed[name] = given[name]
    return changed


def _pickled(error: BaseException) -> bytes:
    """Returns ``error`` pickled, with its traceback as a note. Replaces an error that is no Exception by a RuntimeError."""
    try:
        trace = "".join(traceback.format_exception(error))
        # SystemExit would end the thread of the trainer process that raises it again
        if not isinstance(error, Exception):
            error = RuntimeError(_describe(error))
        error.add_note(f"In the process of the grader:\n{trace}")
        if not _survives(error):  # the constructor takes other arguments than ``args``, or an attribute is a lock
            copyreg.pickle(type(error), _with_text)
        if _survives(error):
            return dumps(error)
    except BaseException:
        pass  # even the text of the error may raise
    return dumps(RuntimeError(_describe(error)))


def _with_text(error: Exception) -> Any:
    """Tells pickle how to restore an exception that it cannot restore by itself. For :mod:`copyreg`.

    The restored exception has the same text. Its type is a subclass of the original one. Attributes that cannot be pickled are
    dropped.
    """
    kind, text = type(error), str(error)
    state = {name: value for name, value in vars(error).items() if _survives(value)}
    copy = type(kind.__name__, (kind,), {"__str__": lambda _: text, "__module__": kind.__module__})
    return kind.__new__, (copy, *filter(_survives, error.args)), state


def _survives(value: Any) -> bool:
    """Returns whether ``value`` can be pickled and unpickled; for an exception, also whether its text stays the same."""
    try:
        copy = pickle.loads(dumps(value))
    except Exception:
        return False
    return not isinstance(value, Exception) or _describe(copy) == _describe(value)


def _plain(value: Any) -> Any:
    """Converts ``value`` to numbers, text, lists and dicts. Raises TypeError if it has other parts."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(part) for part in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    for base in (int, float, str):
        if isinstance(value, base):  # such as a member of an enum
            return base(value)
    raise TypeError(f"an isolated grader returns numbers, text, lists and dicts, found {type(value).__name__}")


def problem_of(error: BaseException) -> str:
    """Returns type and text of ``error``, with the file and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
    return f"{_describe(error)}{place}"


def _describe(error: BaseException) -> str:
    """Returns the type and text of ``error``, cut to 500 characters."""
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except BaseException:  # an exception whose text raises
        return type(error).__name__
