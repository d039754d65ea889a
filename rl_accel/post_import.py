"""Runs a callback when a module has been imported, without ever importing it (PEP 369, on wrapt's import hooks)."""

import importlib
import sys
import threading
from collections.abc import Callable
from types import ModuleType

import wrapt

from rl_accel.errors import PatchRefused

_lock = threading.RLock()
_waiting: dict[str, list[Callable[[ModuleType], None]]] = {}


def wait_for_import(module: str) -> None:
    """Import ``module``; if another thread is importing it, wait for that.

    Raises:
        PatchRefused: this thread itself is in the middle of importing ``module``.
    """
    if is_being_imported(importlib.import_module(module)):
        raise PatchRefused(f"{module} is being imported by this very thread; ask before or after, not now")


def when_imported(
    module: str, callback: Callable[[ModuleType], None], wait: Callable[[str], None] = wait_for_import
) -> None:
    """Call ``callback(module)`` once ``module`` (a dotted name) is imported; at once if it already is.

    Callbacks run in the order they were given, in the thread that imports. What a callback raises comes out of the
    import statement, which then fails as if the module itself had raised. All callbacks of the module stay armed in
    that case, so that importing it a second time cannot go through unnoticed.

    Args:
        module: dotted name.
        callback: called with the module.
        wait: called with ``module`` if it is being imported at the moment. It returns once that is over, or raises: a
            caller that holds a lock which callbacks need must not wait here.

    Raises:
        PatchRefused: as :func:`wait_for_import`.
    """
    with _lock:
        loaded = sys.modules.get(module)
        if loaded is None:
            if module not in _waiting:
                wrapt.register_post_import_hook(_fire, module)
            _waiting.setdefault(module, []).append(callback)
            return
    if is_being_imported(loaded):
        wait(module)
    callback(loaded)


def _fire(module: ModuleType) -> None:
    name = module.__name__
    try:
        for callback in _waiting[name]:
            callback(module)
    except BaseException:
        with _lock:
            # wrapt has forgotten us and takes a module in sys.modules for imported. importlib drops this one anyway.
            sys.modules.pop(name, None)
            wrapt.register_post_import_hook(_fire, name)
        raise
    del _waiting[name]


def is_being_imported(module: ModuleType) -> bool:
    """Return whether ``module`` is in ``sys.modules`` and its code has not run to the end."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
