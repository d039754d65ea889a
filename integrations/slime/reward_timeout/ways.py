"""How a grader is called: where it runs, and whether it takes a list of samples."""

import dis
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.utils.misc import load_function

from rl_accel.errors import ConfigError

_AWAITS = ("GET_AWAITABLE", "GET_ANEXT", "YIELD_VALUE")


@dataclass(frozen=True)
class Way:
    """A grader of the user's.

    Attributes:
        path: its dotted path.
        function: the grader itself.
        awaits: it awaits something, and is awaited on slime's event loop. Any other runs in a process that can be killed.
        takes_lists: it is a coroutine function, which slime itself could call: it is given a list where slime would give it one.
    """

    path: str
    function: Callable[..., Any]
    awaits: bool
    takes_lists: bool


@functools.lru_cache(maxsize=64)
def way_of(path: str) -> Way:
    """Look at the grader at a dotted path.

    Raises:
        ConfigError: there is none.
    """
    try:
        function = load_function(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"rl_accel.reward_timeout.grader wants the dotted path of a function, found {path!r}: {error}"
        ) from error
    called = function if inspect.isroutine(function) or not callable(function) else type(function).__call__
    if isinstance(function, functools.partial):
        called = function.func
    is_async = inspect.iscoroutinefunction(called)
    return Way(path, function, is_async and _awaits(called), is_async)


def _awaits(function: Any) -> bool:
    """Whether a coroutine function ever lets go of the event loop. Many are async only because slime wants them to be."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is None or any(step.opname in _AWAITS for step in dis.get_instructions(code))
