"""Numbers that patched code leaves for the trainer's logger, kept per process until the trainer collects them.

Names are relative (``gae/seconds``); :func:`drain` returns them under ``rl_accel/``. Do not put ``max``, ``min``, ``sum``
or ``total`` into a name: verl chooses how to reduce a metric by these substrings.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger("rl_accel")

Observer = Callable[[int, Mapping[str, Any]], Mapping[str, float]]
"""Makes numbers by relative name of a step and of what the trainer logs for it."""

_lock = threading.Lock()
_values: dict[str, float] = {}
_collectors: dict[str, Callable[[], Mapping[str, float]]] = {}
_observers: dict[str, Any] = {}
_failed: set[str] = set()


def add(name: str, value: float) -> None:
    """Add ``value`` to the running amount of ``name``; the amount starts again at zero after :func:`drain`."""
    with _lock:
        _values[name] = _values.get(name, 0.0) + float(value)


def put(name: str, value: float) -> None:
    """Set ``name`` to ``value``, replacing what was there since the last :func:`drain`."""
    with _lock:
        _values[name] = float(value)


def collect(feature: str, collector: Callable[[], Mapping[str, float]] | None) -> None:
    """Have :func:`drain` ask ``collector`` for what other processes have recorded, by relative name; None: no longer."""
    _enter(_collectors, feature, collector)


def observe(feature: str, observer: Observer | None) -> None:
    """Have :func:`observed` show ``observer`` each step's metrics; None: no longer."""
    _enter(_observers, feature, observer)
    _failed.discard(feature)


def observer(feature: str) -> Any:
    """Return who observes for ``feature``, or None."""
    return _observers.get(feature)


def drain() -> dict[str, float]:
    """Return everything recorded since the last call as ``{"rl_accel/<name>": value}`` and start anew. Never raises."""
    with _lock:
        out, collectors = dict(_values), dict(_collectors)
        _values.clear()
    for feature, collector in collectors.items():
        try:
            out.update(collector())
        except Exception:  # numbers are not worth a step
            logger.warning("rl-accel: the numbers of %s could not be collected", feature, exc_info=True)
    return {f"rl_accel/{name}": value for name, value in out.items()}


def observed(step: int, logged: Mapping[str, Any]) -> dict[str, float]:
    """Return what observers make of the metrics ``logged`` for ``step`` as ``{"rl_accel/<name>": value}``. Never raises.

    An observer that fails costs one warning.
    """
    with _lock:
        observers = dict(_observers)
    out: dict[str, float] = {}
    for feature, look in observers.items():
        try:
            out.update(look(step, logged))
        except Exception:
            if feature not in _failed:
                _failed.add(feature)
                logger.warning("rl-accel: %s failed at step %s, and may again", feature, step, exc_info=True)
    return {f"rl_accel/{name}": value for name, value in out.items()}


def _enter(table: dict[str, Any], feature: str, entry: Any) -> None:
    with _lock:
        if entry is None:
            table.pop(feature, None)
        else:
            table[feature] = entry
