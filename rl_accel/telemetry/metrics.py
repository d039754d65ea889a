"""Numbers that patched code leaves for the trainer's logger, kept per process until the trainer collects them.

Names are relative (``gae/seconds``); :func:`drain` returns them under ``rl_accel/``. Do not put ``max``, ``min``, ``sum``
or ``total`` into a name: verl chooses how to reduce a metric by these substrings.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger("rl_accel")

_lock = threading.Lock()
_values: dict[str, float] = {}
_collectors: dict[str, Callable[[], Mapping[str, float]]] = {}
_observers: dict[str, Callable[[Mapping[str, Any]], Mapping[str, float]]] = {}


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
    with _lock:
        if collector is None:
            _collectors.pop(feature, None)
        else:
            _collectors[feature] = collector


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


def watch(feature: str, observer: Callable[[Mapping[str, Any]], Mapping[str, float]] | None) -> None:
    """Have :func:`observe` show ``observer`` what is logged; its answer, by relative name, is logged too. None: no longer."""
    with _lock:
        if observer is None:
            _observers.pop(feature, None)
        else:
            _observers[feature] = observer


def watching(feature: str) -> Callable[[Mapping[str, Any]], Mapping[str, float]] | None:
    """Return what :func:`watch` was given for ``feature``."""
    with _lock:
        return _observers.get(feature)


def observe(data: Mapping[str, Any]) -> dict[str, float]:
    """Show observers the numbers that are about to be logged, and return theirs as ``{"rl_accel/<name>": value}``. Never raises."""
    with _lock:
        observers = dict(_observers)
    out: dict[str, float] = {}
    for feature, observer in observers.items():
        try:
            out.update(observer(data))
        except Exception:  # an observer is not worth a step
            logger.warning("rl-accel: %s could not take in a step", feature, exc_info=True)
    return {f"rl_accel/{name}": value for name, value in out.items()}
