"""Logging setup that shows the pack's messages even if others silence the root logger."""

import logging


class _WhereNobodyElseWrites(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes a record to standard error if no handler of the root logger accepts the level.

    ``model_hosting_container_standards``, which vLLM imports, sets the root logger and its handlers to ERROR in every process,
    so that warnings and advice of other packages are lost.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if not any(record.levelno >= handler.level for handler in logging.getLogger().handlers):
            super().emit(record)


def set_up() -> None:
    """Makes the logger ``rl_accel`` emit level INFO and above. Idempotent; no effect if the user has set a level or handler."""
    logger = logging.getLogger("rl_accel")
    if logger.level == logging.NOTSET and not logger.handlers:
        logger.setLevel(logging.INFO)
        handler = _WhereNobodyElseWrites()
        handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(message)s"))
        logger.addHandler(handler)
