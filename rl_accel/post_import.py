"""Runs callbacks once a module has been imported, without importing that module (PEP 369, on wrapt's import hooks)."""

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
    """Imports ``module``. If another thread is importing the module, waits for that import.

    Raises:
        PatchRefused: this thread itself is in the middle of importing ``module``.
    """
    if is_being_imported(importlib.import_module(module)):
        raise PatchRefused(f"{module} is being imported by this very thread; ask before or after, not now")


def when_imported(
    module: str, callback: Callable[[ModuleType], None], wait: Callable[[str], None] = wait_for_import
) -> None:
    """Calls ``callback(module)`` once ``module`` (a dotted name) is imported; immediately if it already is.

    Callbacks run in the order of registration, in the importing thread. An exception of a callback propagates from the
    import statement, as if the module itself had raised. All callbacks of the module then stay registered, so that a
    second import runs them again.

    Args:
        module: dotted name.
        callback: called with the module.
        wait: called with ``module`` while that module is being imported. Must return after the import, or raise. A caller
            that holds a lock needed by callbacks must raise, because waiting would deadlock.

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
            # wrapt has dropped our hook and treats modules in sys.modules as imported. importlib drops failed ones anyway.
            sys.modules.pop(name, None)
            wrapt.register_post_import_hook(_fire, name)
        raise
    del _waiting[name]


def is_being_imported(module: ModuleType) -> bool:
    """Returns whether the import of ``module`` is still in progress (its code has not run to the end)."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
