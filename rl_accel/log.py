"""Logging setup that shows the messages of rl-accel even if another package silences the root logger."""

import logging
from collections.abc import Hashable

from rl_accel.switch import forget_when_off

_warned: set[Hashable] = set()
forget_when_off.append(_warned.clear)


class _FallbackHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Log handler that writes a record to standard error if no handler of the root logger accepts the record's level."""

    def emit(self, record: logging.LogRecord) -> None:
        # vLLM imports model_hosting_container_standards, which sets the root logger and all root handlers to level ERROR
        if not any(record.levelno >= handler.level for handler in logging.getLogger().handlers):
            super().emit(record)


def set_up() -> None:
    """Makes the logger ``rl_accel`` emit level INFO and above. Does nothing if this logger already has a level or a handler."""
    logger = logging.getLogger("rl_accel")
    if logger.level == logging.NOTSET and not logger.handlers:
        logger.setLevel(logging.INFO)
        handler = _FallbackHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(message)s"))
        logger.addHandler(handler)


def warn_once(key: Hashable, message: str, *arguments: object, level: int = logging.WARNING) -> None:
    """Logs a message once per ``key``. ``message`` and ``arguments`` are those of :meth:`logging.Logger.warning`."""
    if key not in _warned:
        _warned.add(key)
        logging.getLogger("rl_accel").log(level, message, *arguments)
