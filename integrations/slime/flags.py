"""Our flags among slime's arguments."""

import functools
import json
from typing import Any

from rl_accel.config import RlAccelConfig
from rl_accel.runtime import FRAMEWORK, RUNTIME


def flags_of(args: Any) -> RlAccelConfig:
    """Return the flags under ``args.rl_accel``, in force from then on.

    Raises:
        ConfigError: a flag is wrong.
        PatchRefused: this slime is not one that a feature fits.
    """
    return _resolve(json.dumps(getattr(args, "rl_accel", None) or {}, sort_keys=True))


@functools.lru_cache(maxsize=16)
def _resolve(flags: str) -> RlAccelConfig:
    RUNTIME.set_layer(FRAMEWORK, json.loads(flags))
    return RUNTIME.resolved()
