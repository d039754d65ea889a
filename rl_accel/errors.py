"""All errors that rl-accel raises on purpose; their common base class lets callers catch all of them."""

from typing import Any


class RlAccelError(Exception):
    """Base class of all errors raised by rl-accel."""


class ConfigError(RlAccelError, ValueError):
    """A flag is unknown, has the wrong type or is out of range. The message names the key and what was wanted."""


def refuse(flag: str, key: str, wanted: Any, found: Any, reason: str = "") -> None:
    """Raises ConfigError: a feature does not work with the framework's configuration.

    Args:
        flag: the feature's section, ``"rl_accel.tail_batching"``.
        key: framework's configuration key.
        wanted, found: value that the feature needs, and configured value.
        reason: reason, if not obvious.
    """
    raise ConfigError(f"{flag} wants {key} = {wanted}, found {found}" + (f" ({reason})" if reason else ""))


class RecipeError(RlAccelError, ValueError):
    """An A/B recipe cannot be read or does not fit its schema."""


class PatchRefused(RlAccelError, RuntimeError):
    """A patch target is absent, unsupported, already wrapped by someone else, or disagrees with its replacement."""


class NotInThisVersion(PatchRefused):
    """A patch does not fit this framework version. An independent patch is skipped."""


class BackendMissing(RlAccelError, ImportError):
    """A kernel backend was asked for by name but cannot run here. The message says how to get it."""
