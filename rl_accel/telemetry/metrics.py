"""Metrics from patched code, stored in each process until the trainer collects them for its logger.

Callers use relative names such as ``gae/seconds``. :func:`drain` and :func:`run_observers` return the metrics with the prefix
``rl_accel/``. Do not put ``max``, ``min``, ``sum`` or ``total`` into a name: these substrings tell verl how to reduce a metric.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from rl_accel.switch import forget_when_off

logger = logging.getLogger("rl_accel")

Observer = Callable[[int, Mapping[str, Any]], Mapping[str, float]]
"""Function that a feature runs on each step's number and logged metrics. Returns further metrics, by name without ``rl_accel/``."""


class StopTraining(RuntimeError):
    """Raised by an :data:`Observer` to stop the run, because of the metrics of a step."""


_lock = threading.Lock()
_values: dict[str, float] = {}
_observers: dict[str, Observer] = {}
_failed: set[str] = set()
forget_when_off.append(_values.clear)


def add(name: str, value: float) -> None:
    """Adds ``value`` to the metric ``name``. Metrics begin at 0 after each :func:`drain`."""
    with _lock:
        _values[name] = _values.get(name, 0.0) + float(value)


def put(name: str, value: float) -> None:
    """Sets the metric ``name`` to ``value``."""
    with _lock:
        _values[name] = float(value)


def set_observer(feature: str, observer: Observer | None) -> None:
    """Sets the observer of ``feature``; None removes it. A feature has at most one observer."""
    with _lock:
        _failed.discard(feature)
        if observer is None:
            _observers.pop(feature, None)
        else:
            _observers[feature] = observer


def observer_of(feature: str) -> Observer | None:
    """Returns the observer of ``feature``; None if there is none."""
    return _observers.get(feature)


def drain() -> dict[str, float]:
    """Returns all metrics stored since the last call as ``{"rl_accel/<name>": value}``, and deletes them."""
    with _lock:
        out = {f"rl_accel/{name}": value for name, value in _values.items()}
        _values.clear()
    return out


def run_observers(step: int, logged: Mapping[str, Any]) -> dict[str, float]:
    """Calls all observers with the metrics ``logged`` for ``step``. Returns their metrics as ``{"rl_accel/<name>": value}``.

    Logs the exception of an observer as a warning, once per feature.

    Raises:
        StopTraining: an observer has raised it.
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
