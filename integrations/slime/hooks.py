"""Functions that slime calls by their dotted path, and checks of the flags of rl-accel in slime's arguments."""

import logging
from typing import Any

from rl_accel.config import Flags
from rl_accel.errors import ConfigError, one_line, refuse
from rl_accel.features import REWARD_TIMEOUT, SLIME_DATA, SLIME_MEGATRON
from rl_accel.integrations.slime import launch_line
from rl_accel.integrations.slime.launch_line import function_at, idle_notes, restore_init_function, set_arguments
from rl_accel.runtime import FRAMEWORK, RUNTIME

logger = logging.getLogger("rl_accel")


def flags_of(args: Any) -> Flags:
    """Applies the rl-accel flags in slime's ``args.rl_accel`` to this process. Returns all rl-accel flags in force.

    An earlier call of :func:`rl_accel.disable` does not matter, because ``args`` belongs to a run that began later.

    Raises:
        ConfigError: a flag is wrong.
        PatchRefused: a feature does not support this version of slime.
    """
    sections = getattr(args, "rl_accel", None) or {}
    if sections or RUNTIME.sources() is not None:
        RUNTIME.set_source(FRAMEWORK, sections)
    require_values(RUNTIME.flags())
    return RUNTIME.flags()


def require_values(flags: Flags) -> None:
    """Raises ConfigError for flag values that rl-accel supports on other frameworks, but not on slime."""
    for feature, section, hooks in launch_line.enabled_features(flags):
        for name, values in hooks.values.items():
            if (value := getattr(section, name)) not in values:
                wanted = " or ".join(map(str, values))
                raise ConfigError(f"rl_accel.{feature}.{name} wants {wanted} on slime, found {value}")


def require_functions(flags: Flags) -> None:
    """Raises ConfigError if the grader of the feature ``reward_timeout`` cannot be imported in this process."""
    grader = flags[REWARD_TIMEOUT].grader
    if flags.requested(REWARD_TIMEOUT) == "off" or grader is None:
        return
    try:
        function_at(grader)
    except Exception as error:  # the user's module may raise anything
        found = f"{grader} ({one_line(repr(error))})"
        refuse("rl_accel.reward_timeout", "grader", "a function that can be imported", found)


def require_file(args: Any, flags: Flags) -> None:
    """Raises ConfigError if slime's YAML file lacks an argument that a feature needs, or has a wrong value for SGLang.

    slime reads these arguments before it calls rl-accel, so rl-accel cannot set them itself. Checks only features that are enabled
    by name.
    """
    for feature, section, hooks in launch_line.enabled_features(flags):
        engine = hooks.engine(section)
        for key, wanted in {**hooks.file, **engine}.items():
            found = getattr(args, key, None)
            if section.enable and (found is None or (key in engine and found != wanted)):
                reason = "rl-accel slime-config writes a file that fits the flags"
                refuse(f"rl_accel.{feature}", f"{key} of --custom-config-path", wanted, found, reason)


def data_source(args: Any) -> Any:
    """Turns the enabled features on in slime's rollout process, and returns the run's data source.

    The YAML file names this function as ``--data-source-path``, because slime calls it before any other function of a rollout.

    Raises:
        ConfigError: a flag is wrong, or the launch line conflicts with a feature.
        PatchRefused: a feature enabled by name cannot be applied to this version of slime.
    """
    flags = flags_of(args)
    require_file(args, flags)
    notes = idle_notes(args, flags, SLIME_DATA)
    if getattr(args, "debug_rollout_only", False):  # no training process would log the line
        notes += idle_notes(args, flags, SLIME_MEGATRON)
    for note in [*notes, *set_arguments(args, flags, launch_line.flags_of_this_job())]:
        logger.info("rl-accel: %s", note)
    require_functions(flags_of(args))  # set_arguments may have changed args.rl_accel
    return function_at(args.data_source_path)(args)


def megatron_init(args: Any) -> None:
    """Turns on the features in ``args.rl_accel`` in an actor or critic process (slime's ``--custom-megatron-init-path``).

    Then calls the user's own init function, if the launch line names one. Raises the exceptions of :func:`flags_of`.
    """
    flags = RUNTIME.flags() if getattr(args, "rl_accel", None) is None else flags_of(args)
    before = getattr(args, "custom_megatron_init_path", None)
    notes = idle_notes(args, flags, SLIME_MEGATRON)
    notes += restore_init_function(args, launch_line.flags_of_this_job())
    for note in notes if getattr(args, "rank", 0) == 0 else ():
        logger.info("rl-accel: %s", note)
    if (user_path := getattr(args, "custom_megatron_init_path", None)) != before:
        function_at(str(user_path))(args)
