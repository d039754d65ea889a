"""Numbers that patched code leaves for the trainer's logger, kept per process until the trainer collects them.

Names are relative (``gae/seconds``); :func:`drain` returns them under ``rl_accel/``. Do not put ``max``, ``min``, ``sum``
or ``total`` into a name: verl chooses how to reduce a metric by these substrings.
"""

import logging
import threading
from collections.abc import Callable, Mapping

logger = logging.getLogger("rl_accel")

_lock = threading.Lock()
_values: dict[str, float] = {}
_collectors: dict[str, Callable[[], Mapping[str, float]]] = {}


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
