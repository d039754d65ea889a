"""Functions that slime calls by path, and our flags among its arguments.

A YAML file given to slime's ``--custom-config-path`` switches the pack on::

    custom_megatron_init_path: rl_accel.integrations.slime.hooks.megatron_init
    rl_accel:
      gae: true
"""

import functools
import importlib
import json
from collections.abc import Callable
from typing import Any

from rl_accel.config import Flags
from rl_accel.errors import ConfigError
from rl_accel.features import FEATURES
from rl_accel.runtime import FRAMEWORK, RUNTIME


def flags_of(args: Any) -> Flags:
    """Return the flags under ``args.rl_accel``, in force from then on.

    Raises:
        ConfigError: a flag is wrong.
        PatchRefused: this slime is not one that a feature fits.
    """
    return _resolve(json.dumps(getattr(args, "rl_accel", None) or {}, sort_keys=True))


@functools.lru_cache(maxsize=16)
def _resolve(flags: str) -> Flags:
    RUNTIME.set_layer(FRAMEWORK, json.loads(flags))
    require_values(RUNTIME.flags())
    return RUNTIME.flags()


def require_values(flags: Flags) -> None:
    """Refuse values of flags that only other frameworks have a seam for.

    Raises:
        ConfigError: names the flag, the values that slime has, and the one found.
    """
    for feature in FEATURES:
        if feature.slime is None or flags.requested(feature) == "off":
            continue
        for name, values in feature.slime.values.items():
            value = getattr(flags[feature], name)
            if value not in values:
                wanted = " or ".join(map(str, values))
                raise ConfigError(f"rl_accel.{feature.name}.{name} wants {wanted} on slime, found {value}")


def megatron_init(args: Any) -> None:
    """Put ``args.rl_accel`` in force; slime's ``--custom-megatron-init-path``, called in each actor and critic process.

    Raises:
        ConfigError: a key is unknown or a value unusable (slime itself takes any key of the file), or a feature cannot work
            with slime's arguments.
        PatchRefused: a feature asked for by name cannot be applied to this slime.
    """
    flags = RUNTIME.flags() if getattr(args, "rl_accel", None) is None else flags_of(args)
    for feature in FEATURES:
        if feature.slime and feature.slime.check and flags.requested(feature) != "off":
            function_at(feature.slime.check)(args, flags[feature])


def function_at(path: str) -> Callable[..., Any]:
    """Return the function of a dotted path."""
    module, _, name = path.rpartition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function
