"""A hash of what a function does, unmoved by formatting, comments, docstring, decorators and annotations."""

import ast
import hashlib
import inspect
from collections.abc import Callable
from typing import Any


def fingerprint(function: Callable[..., Any]) -> str | None:
    """Return the sha256 of ``function``'s syntax tree, or None where its source cannot be read.

    Two bodies with one hash do the same; the same body has the same hash on every Python version, because only
    node types, names and constants go in, not the text of :func:`ast.dump`, which changes between versions.
    """
    try:
        source = inspect.getsource(inspect.unwrap(function))
        # A method's source is indented; dedenting it would also move the lines of multi-line strings.
        tree = ast.parse(f"if True:\n{source}" if source[:1].isspace() else source)
    except (OSError, TypeError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return hashlib.sha256(repr(_canonical(_stripped(node))).encode()).hexdigest()
    return None


def _stripped(function: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
    function.decorator_list = []
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:]
    return function


def _canonical(node: Any) -> Any:
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return "Assign", (("targets", [_canonical(node.target)]), ("value", _canonical(node.value)))
    if isinstance(node, ast.AST):
        parts = ((name, _canonical(value)) for name, value in ast.iter_fields(node) if name not in ("ctx", "kind"))
        return type(node).__name__, tuple((name, part) for name, part in parts if part not in (None, []))
    if isinstance(node, list):
        return [_canonical(item) for item in node]
    return repr(node) if node is not None else None
