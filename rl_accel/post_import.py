"""Runs callbacks after another part of the program has imported a module (PEP 369, based on wrapt's import hooks)."""

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
    """Imports the module with the dotted name ``module``. Waits if another thread is already importing the module.

    Raises PatchRefused if the calling thread itself is in the middle of importing ``module``.
    """
    if _is_being_imported(importlib.import_module(module)):
        raise PatchRefused(f"{module} is being imported by this very thread; ask before or after, not now")


def when_imported(module: str, callback: Callable[[ModuleType], None]) -> None:
    """Calls ``callback(module object)`` as soon as the module named ``module`` is imported; at once if it is imported already.

    Callbacks run in the order of registration, in the thread that imports the module. If a callback raises an exception, the import
    statement raises it, and all callbacks of the module stay registered for a second import.

    An import that another thread has begun is waited for. The caller must hold no lock that callbacks need.
    """
    with _lock:
        loaded = sys.modules.get(module)
        if loaded is None:
            if module not in _waiting:
                wrapt.register_post_import_hook(_fire, module)
            _waiting.setdefault(module, []).append(callback)
            return
    if _is_being_imported(loaded):
        wait_for_import(module)
    callback(loaded)


def _fire(module: ModuleType) -> None:
    name = module.__name__
    try:
        for callback in _waiting[name]:
            callback(module)
    except BaseException:
        with _lock:
            # wrapt has dropped our hook, and treats every module in sys.modules as imported. importlib would remove it anyway.
            sys.modules.pop(name, None)
            wrapt.register_post_import_hook(_fire, name)
        raise
    del _waiting[name]


def _is_being_imported(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
