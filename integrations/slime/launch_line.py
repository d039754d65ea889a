"""Puts features in place without losing what the launch line names: it is moved, with a line that says so, or refused.

The file of ``rl-accel slime-config`` names :func:`~rl_accel.integrations.slime.hooks.data_source`, the first function of a rollout
that slime calls. All else that the launch line says is then still in slime's arguments. What the few keys of the file have
overwritten is read from the words of the launch line.
"""

import importlib
import itertools
import logging
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rl_accel.config import Flags
from rl_accel.errors import ConfigError, refuse
from rl_accel.features import FEATURES, REWARD_TIMEOUT, SLIME_DATA, SLIME_MEGATRON, SlimeHooks

logger = logging.getLogger("rl_accel")

STOCK = {
    "data_source_path": "slime.rollout.data_source.RolloutDataSourceWithBuffer",
    "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
}
"""slime's defaults, where they are not None."""
LOG_FUNCTIONS = ("custom_rollout_log_function_path", "custom_eval_rollout_log_function_path")


def words() -> list[str]:
    """Return the words of the command that began this job, which may run on another node."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return sys.argv
    try:
        from ray._private.state import jobs

        job_id = ray.get_runtime_context().get_job_id()
        lexer = shlex.shlex(next(job["Entrypoint"] for job in jobs() if job["JobID"] == job_id), posix=True)
        lexer.whitespace_split, lexer.quotes, lexer.commenters = True, '"', ""  # Ray quotes as Windows does
        return list(lexer)
    except Exception as error:  # Ray promises nothing here
        logger.warning("rl-accel: the launch line is unknown, and not compared with the file of keys: %r", error)
        return []


def one_file(line: Sequence[str]) -> Sequence[str]:
    """Return ``line`` if it names at most one file of keys; slime reads the last without a word about others.

    Raises:
        ConfigError: names the files.
    """
    if len(files := dict.fromkeys(values_of("custom_config_path", line))) > 1:
        raise ConfigError(
            f"slime reads one --custom-config-path, found {', '.join(files)}: put their keys into one file"
        )
    return line


def values_of(key: str, line: Sequence[str]) -> list[str]:
    """Return each value that ``line`` has for an argument of slime."""
    flag = flag_of(key)
    pairs = itertools.pairwise([*line, ""])
    return [after if word == flag else word[len(flag) + 1 :] for word, after in pairs if word.partition("=")[0] == flag]


def overwritten(key: str, ours: object, line: Sequence[str]) -> str | None:
    """Return the value of ``line`` that the file has replaced by ``ours``, None without one."""
    theirs = next(reversed(values_of(key, line)), None)
    return None if theirs == str(ours) else theirs


def hooks_of_features_that_are_on(flags: Flags) -> Iterator[tuple[str, Any, SlimeHooks]]:
    """Yield the name, the flags and the hooks of each feature that is on and has a part for slime."""
    for feature in FEATURES:
        if feature.slime and flags.requested(feature) != "off":
            yield feature.name, flags[feature], feature.slime


def put_init_in_place(args: Any, flags: Flags, line: Sequence[str]) -> list[str]:
    """Set slime's Megatron hook back to that of ``line``, if the file has overwritten it.

    Returns:
        A line if that was so, and one for each feature that was named and has nothing to do under slime's advantage estimator.
    """
    notes, estimator = [], getattr(args, "advantage_estimator", None)
    if path := getattr(args, "custom_advantage_function_path", None):
        estimator = f"--custom-advantage-function-path {path} in its place"
    for name, section, hooks in hooks_of_features_that_are_on(flags):
        if section.enable and hooks.estimators and estimator not in (None, *hooks.estimators):
            wanted = f"--advantage-estimator {' or '.join(hooks.estimators)}"
            notes.append(f"{name} has nothing to do: it serves {wanted}, found {estimator}")
    for key, ours in SLIME_MEGATRON.items():
        if getattr(args, key, None) == ours and (theirs := overwritten(key, ours, line)):
            setattr(args, key, theirs)
            notes.append(f"{flag_of(key)} {theirs} is called after ours")
    return notes


def put_in_place(args: Any, flags: Flags, line: Sequence[str]) -> list[str]:
    """Set slime's arguments as the features want them, and return a line for each part of the launch line that was moved.

    Args:
        args: slime's, changed in place.
        flags: ours.
        line: words of the launch line.

    Raises:
        ConfigError: the launch line and a feature cannot go together. Names slime's argument, what is wanted and what was found.
    """
    notes = []
    args.data_source_path = overwritten("data_source_path", SLIME_DATA["data_source_path"], line)
    if args.data_source_path is None:
        args.data_source_path = STOCK["data_source_path"]
    for name, section, hooks in hooks_of_features_that_are_on(flags):
        engine = hooks.engine(section)
        taken = {key: overwritten(key, ours, line) for key, ours in engine.items()}
        for key, theirs in {**taken, **{key: getattr(args, key, None) for key in hooks.unset}}.items():
            if theirs is not None:
                refuse(f"rl_accel.{name}", flag_of(key), engine.get(key, "unset"), theirs)
        for key, ours in hooks.arguments.items():
            theirs = getattr(args, key, None)
            if isinstance(ours, list):
                ours = [*(theirs or []), *(path for path in ours if path not in (theirs or []))]
            elif theirs in (None, ours, STOCK.get(key)):
                pass
            elif key in LOG_FUNCTIONS:
                args.rl_accel_kept = {**getattr(args, "rl_accel_kept", {}), key: theirs}
                notes.append(f"{flag_of(key)} {theirs} is called after ours")
            elif key == "custom_rm_path" and flags[REWARD_TIMEOUT].grader in (None, theirs):
                given = args.rl_accel.get(name) or {}
                given = given if isinstance(given, Mapping) else {"enable": given}
                args.rl_accel = {**args.rl_accel, name: {**given, "grader": theirs}}
                notes.append(f"{flag_of(key)} {theirs} is now rl_accel.reward_timeout.grader")
            else:
                refuse(f"rl_accel.{name}", flag_of(key), getattr(section, "grader", "unset"), theirs)
            setattr(args, key, ours)
        if hooks.check:
            function_at(hooks.check)(args, section)
    return notes


def function_at(path: str) -> Callable[..., Any]:
    """Return the function of a dotted path."""
    module, _, name = path.rpartition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def flag_of(key: str) -> str:
    """Return the flag of an argument of slime."""
    return "--" + key.replace("_", "-")
