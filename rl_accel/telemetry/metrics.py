"""Metrics from patched code for the trainer's logger, kept per process until the trainer collects them.

Names are relative (``gae/seconds``); :func:`drain` and :func:`observed` return them under ``rl_accel/``. Do not put ``max``,
``min``, ``sum`` or ``total`` into a name: verl chooses how to reduce a metric by these substrings.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from rl_accel.switch import forget_when_off

logger = logging.getLogger("rl_accel")

Observer = Callable[[int, Mapping[str, Any]], Mapping[str, float]]
"""Function of a step and the step's logged metrics; returns further metrics by relative name."""


class StopTraining(RuntimeError):
    """Raised by an observer if a step shows an error so severe that the run must stop."""


_lock = threading.Lock()
_values: dict[str, float] = {}
_observers: dict[str, Observer] = {}
_failed: set[str] = set()
forget_when_off.append(_values.clear)


def add(name: str, value: float) -> None:
    """Adds ``value`` to the running sum of ``name``; the sum restarts at zero after :func:`drain`."""
    with _lock:
        _values[name] = _values.get(name, 0.0) + float(value)


def put(name: str, value: float) -> None:
    """Sets ``name`` to ``value``, replacing any value since the last :func:`drain`."""
    with _lock:
        _values[name] = float(value)


def observe(feature: str, observer: Observer | None) -> None:
    """Registers ``observer``, which :func:`observed` calls with each step's metrics; None removes the registration."""
    with _lock:
        _failed.discard(feature)
        if observer is None:
            _observers.pop(feature, None)
        else:
            _observers[feature] = observer


def observer(feature: str) -> Observer | None:
    """Returns the observer of ``feature``, or None."""
    return _observers.get(feature)


def drain() -> dict[str, float]:
    """Returns all metrics since the last call as ``{"rl_accel/<name>": value}`` and clears them."""
    with _lock:
        out = {f"rl_accel/{name}": value for name, value in _values.items()}
        _values.clear()
    return out


def observed(step: int, logged: Mapping[str, Any]) -> dict[str, float]:
    """Calls all observers with the metrics ``logged`` for ``step``; returns their metrics as ``{"rl_accel/<name>": value}``.

    An observer that fails is logged once, as a warning.

    Raises:
        StopTraining: raised by an observer.
    """
    with _lock:
        observers = dict(_observers)
    out: dict[str, float] = {}
    for feature, look in observers.items():
        try:
            out.update(look(step, logged))
        except StopTraining:
            raise
        except Exception:  # metrics must not make a step fail
            if feature not in _failed:
                _failed.add(feature)
                logger.warning("rl-accel: %s failed at step %s, and may again", feature, step, exc_info=True)
    return {f"rl_accel/{name}": value for name, value in out.items()}
