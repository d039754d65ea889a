"""Numbers that patched code leaves for the trainer's logger, kept per process until the trainer collects them.

Names are relative (``gae/seconds``); :func:`drain` returns them under ``rl_accel/``. Do not put ``max``, ``min``, ``sum``
or ``total`` into a name: verl chooses how to reduce a metric by these substrings.
"""

import threading

_lock = threading.Lock()
_values: dict[str, float] = {}


def add(name: str, value: float) -> None:
    """Add ``value`` to the running amount of ``name``; the amount starts again at zero after :func:`drain`."""
    with _lock:
        _values[name] = _values.get(name, 0.0) + float(value)


def put(name: str, value: float) -> None:
    """Set ``name`` to ``value``, replacing what was there since the last :func:`drain`."""
    with _lock:
        _values[name] = float(value)


def drain() -> dict[str, float]:
    """Return everything recorded since the last call as ``{"rl_accel/<name>": value}`` and start anew."""
    with _lock:
        out = {f"rl_accel/{name}": value for name, value in _values.items()}
        _values.clear()
    return out
