"""Every error rl-accel raises on purpose, so that a caller can catch them in one place."""


class RlAccelError(Exception):
    """Base class of all errors raised by rl-accel."""


class ConfigError(RlAccelError, ValueError):
    """A flag is unknown, has the wrong type or is out of range. The message names the key and what was wanted."""


class RecipeError(RlAccelError, ValueError):
    """An A/B recipe cannot be read or does not fit its schema."""


class PatchRefused(RlAccelError, RuntimeError):
    """A patch target is absent, unsupported, already wrapped by someone else, or disagrees with its replacement."""


class NotInThisVersion(PatchRefused):
    """One of several independent patches of a feature does not exist for this version; the feature goes on without it."""


class BackendMissing(RlAccelError, ImportError):
    """A kernel backend was asked for by name but cannot run here. The message says how to get it."""
