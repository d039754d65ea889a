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
        ConfigError: a key is unknown or a value unusable. slime itself takes any key of the file. Or tp_replan cannot work with
            slime's arguments: its own function is called only after the first rollout.
        PatchRefused: a feature asked for by name cannot be applied to this slime.
    """
    from rl_accel.runtime import FRAMEWORK, RUNTIME

    flags = getattr(args, "rl_accel", None)
    if flags is not None:
        RUNTIME.set_layer(FRAMEWORK, flags)
    tp_replan = RUNTIME.resolved().tp_replan
    if tp_replan.enable:
        from rl_accel.integrations.slime.tp_replan import arguments

        arguments.check(args, tp_replan)
