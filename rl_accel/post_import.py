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

    Raises:
        PatchRefused: the calling thread itself is in the middle of importing ``module``.
    """
    if is_being_imported(importlib.import_module(module)):
        raise PatchRefused(f"{module} is being imported by this very thread; ask before or after, not now")


def when_imported(
    module: str, callback: Callable[[ModuleType], None], wait: Callable[[str], None] = wait_for_import
) -> None:
    """Calls ``callback(module object)`` as soon as the module named ``module`` is imported; at once if it is imported already.

    Callbacks run in the order of registration, in the thread that imports the module. If a callback raises an exception, the import
    statement raises it, and all callbacks of the module stay registered for a second import.

    If the import is in progress, calls ``wait(module)`` first. ``wait`` must return once the import is complete, or raise an
    exception. It must raise if the caller holds a lock that callbacks need, because waiting would deadlock.
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
            # wrapt has dropped our hook and treats every module in sys.modules as imported, even if the import has failed.
            # importlib would remove the failed module from sys.modules anyway.
            sys.modules.pop(name, None)
            wrapt.register_post_import_hook(_fire, name)
        raise
    del _waiting[name]


def is_being_imported(module: ModuleType) -> bool:
    """Returns whether the import of ``module`` is still in progress, so that not all code of the module has run."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
