"""Numbers that patched code leaves for the trainer's logger, kept per process until the trainer collects them.

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
"""Makes numbers by relative name of a step and of what the trainer logs for it."""


class StopTraining(RuntimeError):
    """Raised by an observer: what a step has shown is so wrong that the run must not go on."""


_lock = threading.Lock()
_values: dict[str, float] = {}
_observers: dict[str, Observer] = {}
_failed: set[str] = set()
forget_when_off.append(_values.clear)


def add(name: str, value: float) -> None:
    """Add ``value`` to the running amount of ``name``; the amount starts again at zero after :func:`drain`."""
    with _lock:
        _values[name] = _values.get(name, 0.0) + float(value)


def put(name: str, value: float) -> None:
    """Set ``name`` to ``value``, replacing what was there since the last :func:`drain`."""
    with _lock:
        _values[name] = float(value)


def observe(feature: str, observer: Observer | None) -> None:
    """Have :func:`observed` show ``observer`` each step's metrics; None: no longer."""
    with _lock:
        _failed.discard(feature)
        if observer is None:
            _observers.pop(feature, None)
        else:
            _observers[feature] = observer


def observer(feature: str) -> Observer | None:
    """Return who observes for ``feature``, or None."""
    return _observers.get(feature)


def drain() -> dict[str, float]:
    """Return everything recorded since the last call as ``{"rl_accel/<name>": value}`` and start anew."""
    with _lock:
        out = {f"rl_accel/{name}": value for name, value in _values.items()}
        _values.clear()
    return out


def observed(step: int, logged: Mapping[str, Any]) -> dict[str, float]:
    """Return what observers make of the metrics ``logged`` for ``step`` as ``{"rl_accel/<name>": value}``.

    An observer that fails costs one warning.

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
        except Exception:  # numbers are not worth a step
            if feature not in _failed:
                _failed.add(feature)
                logger.warning("rl-accel: %s failed at step %s, and may again", feature, step, exc_info=True)
    return {f"rl_accel/{name}": value for name, value in out.items()}
