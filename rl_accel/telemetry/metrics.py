"""Metrics from patched code, kept per process until the trainer process collects the metrics for its logger.

Callers use relative names such as ``gae/seconds``. :func:`drain` and :func:`run_observers` return the metrics with the prefix
``rl_accel/``. Do not put ``max``, ``min``, ``sum`` or ``total`` into a name, because verl chooses how to reduce a metric by these
substrings.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from rl_accel.switch import forget_when_off

logger = logging.getLogger("rl_accel")

Observer = Callable[[int, Mapping[str, Any]], Mapping[str, float]]
"""Function of a step number and of the metrics logged for this step. Returns further metrics of the step, by name without the
prefix ``rl_accel/``."""


class StopTraining(RuntimeError):
    """Raised by an :data:`Observer` if the metrics of a step show an error so severe that the run must stop."""


_lock = threading.Lock()
_values: dict[str, float] = {}
_observers: dict[str, Observer] = {}
_failed: set[str] = set()
forget_when_off.append(_values.clear)


def add(name: str, value: float) -> None:
    """Adds ``value`` to the sum that is kept for the metric ``name``. The sum restarts at zero after :func:`drain`."""
    with _lock:
        _values[name] = _values.get(name, 0.0) + float(value)


def put(name: str, value: float) -> None:
    """Sets the metric ``name`` to ``value``. Replaces the value set since the last :func:`drain`, if any."""
    with _lock:
        _values[name] = float(value)


def set_observer(feature: str, observer: Observer | None) -> None:
    """Sets the ``observer`` that :func:`run_observers` calls for ``feature``, instead of any earlier observer. None removes it."""
    with _lock:
        _failed.discard(feature)
        if observer is None:
            _observers.pop(feature, None)
        else:
            _observers[feature] = observer


def observer_of(feature: str) -> Observer | None:
    """Returns the observer registered for ``feature``; None if there is none."""
    return _observers.get(feature)


def drain() -> dict[str, float]:
    """Returns all metrics set since the last call as ``{"rl_accel/<name>": value}``, and deletes these metrics."""
    with _lock:
        out = {f"rl_accel/{name}": value for name, value in _values.items()}
        _values.clear()
    return out


def run_observers(step: int, logged: Mapping[str, Any]) -> dict[str, float]:
    """Calls all registered observers with the metrics ``logged`` for ``step``. Returns the metrics that the observers compute.

    The result has the form ``{"rl_accel/<name>": value}``. An exception of an observer is logged as a warning, once per feature.

    Raises:
        StopTraining: an observer requests that the run stops.
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
