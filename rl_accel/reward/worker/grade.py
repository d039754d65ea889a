"""Finds a grader, and calls it in this process."""

import importlib
import importlib.util
import json
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

from .run_program import describe


def find(target: str, arguments: dict[str, Any] | None) -> Callable[..., Any]:
    """The function that ``target`` names, "module:function" or "/path/file.py:function".

    Args:
        target: with ``arguments`` it is called once with them, and what it returns is the function.

    Raises:
        BaseException: whatever its import or its call raises; TypeError if it is no function.
    """
    where, _, name = target.rpartition(":")
    found: Any = _load(where) if where.endswith(".py") else importlib.import_module(where)
    for part in name.split("."):
        found = getattr(found, part)
    if arguments is not None:
        found = found(**arguments)
    if not callable(found):
        raise TypeError(f"{target} must be a function, found {found!r}")
    function: Callable[..., Any] = found
    return function


def _load(path: str) -> Any:
    name = os.path.splitext(os.path.basename(path))[0]
    if name in sys.modules:
        name = f"{name}_of_rl_accel"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def grade(function: Callable[..., Any], payload: bytes, plain: bool) -> bytes:
    """The report of one call: a line of JSON with ``verdict`` and ``reason``, and the pickled value.

    Args:
        function: the grader.
        payload: its keyword arguments, pickled.
        plain: reduce the value to types that can be unpickled without trust in who wrote them.
    """
    try:
        value = function(**pickle.loads(payload))
        body = pickle.dumps(as_plain(value) if plain else value, pickle.HIGHEST_PROTOCOL)
        head = {"verdict": "done", "reason": ""}
    except BaseException as error:
        body = b""
        head = {"verdict": "error", "reason": describe(error)}
    return json.dumps(head).encode() + b"\n" + body


def as_plain(value: Any) -> Any:
    """The value of numbers, text, bytes, lists, tuples, sets and dicts; arrays become lists, their scalars numbers.

    Raises:
        TypeError: there is something else in it.
    """
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    if isinstance(value, dict):
        return {as_plain(key): as_plain(part) for key, part in value.items()}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return kind(as_plain(part) for part in value)
    if hasattr(value, "tolist"):
        return as_plain(value.tolist())
    for base in (int, float, str):
        if isinstance(value, base):  # an enum's member, say
            return base(value)
    raise TypeError(f"a limited grader returns numbers, text, lists and dicts, found {type(value).__name__}")
