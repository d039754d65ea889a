"""The pack's log. What it says is seen whatever other packages do to the root logger."""

import logging


class _WhereNobodyElseWrites(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes a record to standard error if no handler of the root logger will.

    ``model_hosting_container_standards``, which vLLM imports, sets the root logger and its handlers to ERROR in every process:
    warnings and advice of everyone else are lost.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if not any(record.levelno >= handler.level for handler in logging.getLogger().handlers):
            super().emit(record)


def set_up() -> None:
    """Let the logger ``rl_accel`` say what is of level INFO and above. Idempotent; what a user has set up stays."""
    logger = logging.getLogger("rl_accel")
    if logger.level == logging.NOTSET and not logger.handlers:
        logger.setLevel(logging.INFO)
        handler = _WhereNobodyElseWrites()
        handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(message)s"))
        logger.addHandler(handler)
