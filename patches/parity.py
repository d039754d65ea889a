"""Safeguards for replaced framework functions: a comparison before the swap, and a fallback to the original function."""

import copy
import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch

from rl_accel.errors import BackendMissing, PatchRefused, one_line
from rl_accel.log import warn_once
from rl_accel.telemetry import metrics

PROBING: ContextVar[bool] = ContextVar("probing", default=False)
"""True while a replacement is compared with the original. The replacement then records no metrics, and never uses the fallback."""
_COMPARING: ContextVar[bool] = ContextVar("comparing", default=False)
"""True while a replacement or its original is called for a comparison. An original may call replacements of other functions, whose
calls are not counted then."""


def require_agreement(
    original: Callable[..., Any],
    replacement: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    """Calls ``original`` and ``replacement`` with copies of ``arguments``, and checks that the outputs are equal.

    Outputs are tensors, or tuples or lists of them, which may be nested. Dtypes, shapes and devices must match, and elements within
    the tolerances ``rtol`` (relative) and ``atol`` (absolute). NaN equals NaN.

    Raises:
        PatchRefused: outputs differ. The message names the output, the position and the difference.
        TypeError, ValueError, BackendMissing: ``replacement`` does not support these arguments.
    """
    comparing = _COMPARING.set(True)
    try:
        expected = _call(original, arguments)
        probing = PROBING.set(True)
        try:
            outputs = _call(replacement, arguments)
        finally:
            PROBING.reset(probing)
    finally:
        _COMPARING.reset(comparing)
    try:
        torch.testing.assert_close(outputs, expected, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        raise PatchRefused(f"the outputs differ: {one_line(error)}") from error


def with_fallback(function: Callable[..., Any], original: Callable[..., Any], feature: str) -> Callable[..., Any]:
    """Returns a function that calls ``function``, or ``original`` if ``function`` raises TypeError, ValueError or BackendMissing.

    Each error message is logged once as a warning. The metrics ``<feature>/calls`` and ``<feature>/stock_calls`` count the calls of
    ``function`` and of ``original``.
    """

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
            if not _COMPARING.get():
                metrics.add(f"{feature}/calls", 1)
            return result
        except (TypeError, ValueError, BackendMissing) as error:
            if PROBING.get():
                raise
            reason = str(error)
        if not _COMPARING.get():
            metrics.add(f"{feature}/stock_calls", 1)
        name = original.__qualname__
        warn_once((name, reason), "rl-accel: a call is left to the framework's own %s: %s", name, reason)
        return original(*args, **kwargs)

    return replacement


def _call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    output = function(**copy.deepcopy(dict(arguments)))
    return tuple(output) if isinstance(output, tuple | list) else (output,)
