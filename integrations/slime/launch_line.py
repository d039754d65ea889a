"""Sets slime's arguments for our features. Functions named on the launch line are kept, moved (with a log line) or refused.

The launch line is the command that started the job. The YAML file from ``rl-accel slime-config`` names
:func:`~rl_accel.integrations.slime.hooks.data_source`, the first rollout function that slime calls. At that time, slime's arguments
still hold the launch line's values. Only the few values that the file has overwritten are read from the launch line's words.
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
"""slime's defaults for arguments that features set, where the default is not None."""
LOG_FUNCTIONS = ("custom_rollout_log_function_path", "custom_eval_rollout_log_function_path")


def of_this_job() -> dict[str, str]:
    """Returns the flags of the command that started this job, possibly on another node; see :func:`read`."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return read(sys.argv)
    try:
        from ray._private.state import jobs

        job_id = ray.get_runtime_context().get_job_id()
        lexer = shlex.shlex(next(job["Entrypoint"] for job in jobs() if job["JobID"] == job_id), posix=True)
        lexer.whitespace_split, lexer.quotes, lexer.commenters = True, '"', ""  # Ray quotes as Windows does
        words = list(lexer)
    except Exception as error:  # a private Ray API without guarantees
        logger.warning("rl-accel: the launch line is unknown, and not compared with the file of keys: %r", error)
        return {}
    return read(words)


def read(words: Sequence[str]) -> dict[str, str]:
    """Returns the flags of a launch line: mapping from the name of slime's argument to the flag's value.

    Raises:
        ConfigError: the launch line names two custom config files; slime would read only the last.
    """
    line: dict[str, str] = {}
    for word, after in itertools.pairwise([*words, ""]):
        flag, equals, value = word.partition("=")
        key, value = flag.removeprefix("--").replace("-", "_"), value if equals else after
        if key == "custom_config_path" and line.get(key, value) != value:
            raise ConfigError(
                f"slime reads one --custom-config-path, found {line[key]} and {value}: put their keys into one"
            )
        if flag.startswith("--"):
            line[key] = value
    return line


def hooks_of_features_that_are_on(flags: Flags) -> Iterator[tuple[str, Any, SlimeHooks]]:
    """Yields the name, the flags and the hooks of each feature that is on and supports slime."""
    for feature in FEATURES:
        if feature.slime and flags.requested(feature) != "off":
            yield feature.name, flags[feature], feature.slime


def put_init_in_place(args: Any, flags: Flags, line: Mapping[str, str]) -> list[str]:
    """Restores slime's Megatron hook from ``line`` if the YAML file has overwritten the hook.

    Returns:
        Log lines: one if the hook was restored, and one per explicitly enabled feature that does not serve the advantage estimator.
    """
    notes, estimator = [], getattr(args, "advantage_estimator", None)
    if path := getattr(args, "custom_advantage_function_path", None):
        estimator = f"--custom-advantage-function-path {path} in its place"
    for name, section, hooks in hooks_of_features_that_are_on(flags):
        if section.enable and hooks.estimators and estimator not in (None, *hooks.estimators):
            wanted = f"--advantage-estimator {' or '.join(hooks.estimators)}"
            notes.append(f"{name} has nothing to do: it serves {wanted}, found {estimator}")
    for key, ours in SLIME_MEGATRON.items():
        if getattr(args, key, None) == ours != (theirs := line.get(key, ours)):
            setattr(args, key, theirs)
            notes.append(f"{flag_of(key)} {theirs} is called after ours")
    return notes


def put_in_place(args: Any, flags: Flags, line: Mapping[str, str]) -> list[str]:
    """Sets slime's arguments for the features. Returns a log line for each function of the launch line that was moved.

    Args:
        args: slime's arguments, changed in place.
        flags: rl-accel's flags.
        line: launch line, as returned by :func:`read`.

    Raises:
        ConfigError: the launch line conflicts with a feature. The message names slime's argument, the wanted and the found value.
    """
    notes = []
    source = line.get("data_source_path")
    args.data_source_path = STOCK["data_source_path"] if source in (None, *SLIME_DATA.values()) else source
    for name, section, hooks in hooks_of_features_that_are_on(flags):
        for key, wanted in {**hooks.engine(section), **dict.fromkeys(hooks.unset)}.items():
            found = getattr(args, key, None) if wanted is None else line.get(key, wanted)
            if str(found) != str(wanted):
                refuse(f"rl_accel.{name}", flag_of(key), "unset" if wanted is None else wanted, found)
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
    """Returns the function at a dotted path."""
    module, _, name = path.rpartition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def flag_of(key: str) -> str:
    """Returns the command-line flag of one of slime's arguments."""
    return "--" + key.replace("_", "-")
