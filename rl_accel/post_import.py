"""Runs a callback when a module has been imported, without ever importing it (PEP 369, on wrapt's import hooks)."""

import importlib
import sys
import threading
from collections.abc import Callable
from types import ModuleType

import wrapt

from rl_accel.errors import PatchRefused

_lock = threading.RLock()
_waiting: dict[str, list["Hook"]] = {}
_executed: set[str] = set()


class Hook:
    """A callback that waits for a module. Made by :func:`when_imported`."""

    def __init__(self, module: str, callback: Callable[[ModuleType], None]) -> None:
        self.module = module
        self.callback = callback

    def cancel(self) -> None:
        """Take the callback back. Does nothing once it has run."""
        with _lock:
            waiting = _waiting.get(self.module, [])
            if self in waiting:
                waiting.remove(self)

    @property
    def waiting(self) -> bool:
        """Whether the module has not been imported yet and the hook was not cancelled."""
        with _lock:
            return self in _waiting.get(self.module, [])


def when_imported(module: str, callback: Callable[[ModuleType], None]) -> Hook:
    """Call ``callback(module)`` once ``module`` (a dotted name) is imported; at once if it already is.

    Callbacks run in the order they were given, in the thread that imports. What a callback raises comes out of the
    import statement, which then fails as if the module itself had raised. All callbacks of the module stay armed in
    that case, so that importing it a second time cannot go through unnoticed.

    Raises:
        PatchRefused: this thread is in the middle of importing ``module``, so that it can neither be used nor awaited.
    """
    hook = Hook(module, callback)
    with _lock:
        loaded = sys.modules.get(module)
        if loaded is None:
            # An empty list is kept after cancel(): wrapt holds our one entry for the module and cannot give it back.
            first = module not in _waiting
            _waiting.setdefault(module, []).append(hook)
            if first:
                wrapt.register_post_import_hook(_fire, module)
            return hook
    callback(_complete(loaded))
    return hook


def _fire(module: ModuleType) -> None:
    name = module.__name__
    with _lock:
        hooks = list(_waiting.get(name, []))
        _executed.add(name)
    try:
        for hook in hooks:
            if hook.waiting:
                hook.callback(module)
    except BaseException:
        with _lock:
            # wrapt has forgotten us and takes a module in sys.modules for imported. importlib drops this one anyway.
            sys.modules.pop(name, None)
            wrapt.register_post_import_hook(_fire, name)
        raise
    else:
        with _lock:
            _waiting.pop(name, None)
    finally:
        _executed.discard(name)


def _complete(module: ModuleType) -> ModuleType:
    name = module.__name__
    if _importing(module) and name not in _executed:
        importlib.import_module(name)  # waits for the thread that is importing it
        if _importing(module):
            raise PatchRefused(f"{name} is being imported by this very thread; ask before or after, not now")
    return module


def _importing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
