"""Functions that slime calls by path.

A YAML file given to slime's ``--custom-config-path`` switches the pack on::

    custom_megatron_init_path: rl_accel.integrations.slime.hooks.megatron_init
    rl_accel:
      gae: true
"""

from typing import Any


def megatron_init(args: Any) -> None:
    """Put ``args.rl_accel`` in force; slime's ``--custom-megatron-init-path``, called in each actor and critic process.

    Raises:
        ConfigError: a key is unknown or a value unusable. slime itself takes any key of the file.
        PatchRefused: a feature asked for by name cannot be applied to this slime.
    """
    from rl_accel.runtime import FRAMEWORK, RUNTIME

    flags = getattr(args, "rl_accel", None)
    if flags is not None:
        RUNTIME.set_layer(FRAMEWORK, flags)
