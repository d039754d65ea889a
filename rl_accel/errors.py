"""Exceptions that rl-accel raises on purpose. All have the base class :class:`RlAccelError`, which callers can catch."""

import difflib
from collections.abc import Iterable
from typing import Any, NoReturn


class RlAccelError(Exception):
    """Base class of all errors raised by rl-accel."""


class ConfigError(RlAccelError, ValueError):
    """Error for an unknown flag, an invalid value, or a flag that conflicts with the framework's configuration."""


def refuse(flag: str, key: str, wanted: Any, found: Any, reason: str = "") -> NoReturn:
    """Raises a ConfigError which says that a feature does not work with a value in the framework's configuration.

    Args:
        flag: name of the feature's section of flags, such as ``"rl_accel.tail_batching"``.
        key: key in the framework's configuration.
        wanted, found: value of ``key`` that the feature needs, and value in the configuration.
        reason: why the feature needs the value ``wanted``; "" if obvious.
    """
    raise ConfigError(f"{flag} wants {key} = {wanted}, found {found}" + (f" ({reason})" if reason else ""))


def did_you_mean(word: Any, known: Iterable[str], prefix: str = "") -> str:
    """Returns the hint " (did you mean x?)" for the name x in ``known`` that is most similar to ``word``; "" if none is similar."""
    close = difflib.get_close_matches(str(word), known, n=1)
    return f" (did you mean {prefix}{close[0]}?)" if close else ""


def root_cause(error: BaseException) -> BaseException:
    """Returns the exception that a remote call raised, if ``error`` is Ray's report of this exception; otherwise ``error``."""
    while isinstance(cause := getattr(error, "cause", None), BaseException) and cause is not error:
        error = cause
    return error


def first_line(error: object) -> str:
    """Returns the first line of the message of ``error``; the name of the class of ``error`` if there is no message.

    If ``error`` reports an exception of another process, returns the line of that exception, not the name of the call.
    """
    if isinstance(error, BaseException):
        error = root_cause(error)
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    # A cause that cannot be sent to this process leaves its traceback, which ends with the class and message of the cause.
    is_traceback = any("Traceback (most recent call last)" in line or "ray::" in line for line in lines)
    return lines[-1].strip() if is_traceback else lines[0]


def typed_line(error: BaseException) -> str:
    """Returns ``error`` in one line, as in the last line of a traceback: name of the class, and :func:`first_line`."""
    name = type(root_cause(error)).__name__
    line = first_line(error)
    return line if line == name else f"{name}: {line}"


def one_line(error: object) -> str:
    """Returns the message of ``error`` in one line; the name of the class of ``error`` if there is no message."""
    return " ".join(str(error).split()) or type(error).__name__


class RecipeError(RlAccelError, ValueError):
    """Error for a recipe file of an A/B comparison that cannot be read or has invalid content."""


class PatchRefused(RlAccelError, RuntimeError):
    """Error for a framework function that rl-accel cannot replace safely or restore exactly, such as an absent function."""


class NotInThisVersion(PatchRefused):
    """Error for a patch that does not fit the installed framework version. The feature stays on if another of its patches fits."""


class BackendMissing(RlAccelError, ImportError):
    """Error for a requested kernel backend that cannot run on this machine. The message says how to install the backend."""
