"""Every error rl-accel raises on purpose, so that a caller can catch them in one place."""

from typing import Any


class RlAccelError(Exception):
    """Base class of all errors raised by rl-accel."""


class ConfigError(RlAccelError, ValueError):
    """A flag is unknown, has the wrong type or is out of range. The message names the key and what was wanted."""


def refuse(flag: str, key: str, wanted: Any, found: Any, reason: str = "") -> None:
    """Raise the ConfigError that says that a feature and a framework's configuration cannot go together.

    Args:
        flag: the feature's section, ``"rl_accel.tail_batching"``.
        key: the framework's.
        wanted, found: its values.
        reason: why, where that is not plain.
    """
    raise ConfigError(f"{flag} wants {key} = {wanted}, found {found}" + (f" ({reason})" if reason else ""))


class RecipeError(RlAccelError, ValueError):
    """An A/B recipe cannot be read or does not fit its schema."""


class PatchRefused(RlAccelError, RuntimeError):
    """A patch target is absent, unsupported, already wrapped by someone else, or disagrees with its replacement."""


class NotInThisVersion(PatchRefused):
    """One of several independent patches of a feature does not exist for this version; the feature goes on without it."""


class BackendMissing(RlAccelError, ImportError):
    """A kernel backend was asked for by name but cannot run here. The message says how to get it."""
