"""Sets slime's arguments to the values that the enabled features of rl-accel need.

The launch line is the command that started the job. It may name a function of the user for such an argument. This function is then
kept, called by rl-accel's function (with a log line), or refused.

:func:`~rl_accel.integrations.slime.hooks.data_source` does this, which slime calls before any other function of a rollout. slime's
arguments then still hold the values of the launch line. The few values that the YAML file has overwritten are read from the words
of the launch line.
"""

import importlib
import itertools
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl_accel.config import Flags
from rl_accel.errors import ConfigError, refuse
from rl_accel.features import FEATURES, SAMPLER, SLIME_DATA, SLIME_MEGATRON, TAIL_BATCHING, SlimeHooks

logger = logging.getLogger("rl_accel")

STOCK = {
    "data_source_path": "slime.rollout.data_source.RolloutDataSourceWithBuffer",
    "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
}
"""slime's own defaults of the arguments that features set, by argument name. Arguments with the default None are left out."""
FINE_TUNING = "slime.rollout.sft_rollout.generate_rollout"
"""slime's rollout function that takes responses from the data set."""
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
"""slime's rollout function that keeps unfinished requests for later batches."""
ASYNC_SCRIPT = "train_async.py"
"""slime's script that generates the next batch while it trains on the last one."""
SCRIPT = "script.py"
"""Key of the script's file name in the result of :func:`read_flags`. No argument of slime has a dot in its name."""
_QUOTED_FLAG = re.compile(r"--[\w-]+\s")
"""Pattern of a flag and white space within one word, as in ``"--flag value"``: quotes have joined two words by mistake."""
_UNEXPANDED = re.compile(r"\$[@*]|\$\{\w+\[[@*]\]\}")
"""Pattern of a shell variable that holds several words, such as ``$@`` or ``${ARGS[@]}``."""
_VARIABLE = re.compile(r"\$\w+|\$\{\w+\}")
LOG_FUNCTION = "custom_rollout_log_function_path"
"""Name of slime's argument that holds the user's log function for rollouts."""


def flags_of_this_job() -> dict[str, str]:
    """Returns the flags on the command line that started this job, see :func:`read_flags`.

    In a Ray job, Ray is asked for the command, which may have run on another node. Returns {} if Ray does not answer.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return read_flags(sys.argv)
    try:
        from ray._private.state import jobs

        job_id = ray.get_runtime_context().get_job_id()
        lexer = shlex.shlex(next(job["Entrypoint"] for job in jobs() if job["JobID"] == job_id), posix=True)
        lexer.whitespace_split = True
        lexer.quotes = '"'  # Ray quotes words as on Windows
        lexer.commenters = ""
        words = list(lexer)
    except Exception as error:  # a private Ray API without guarantees
        logger.warning("rl-accel: the launch line is unknown, and not compared with the file of keys: %r", error)
        return {}
    return read_flags(words)


def words_of_flags(words: Sequence[str]) -> Sequence[str]:
    """Returns the words of a launch line from the script on, which is the first word that ends in ``.py``.

    Words up to the last ``--``, as in ``ray job submit --``, are left out. Without a script, returns all other words.

    Raises:
        ConfigError: there is no flag, two words are joined by quotes (``"--flag value"``), or a shell has not replaced a variable
            such as ``${ARGS[@]}``.
    """
    command = max((n for n, word in enumerate(words, 1) if word == "--"), default=0)
    has_flags = any(word.startswith("--") for word in words[command:])
    for before, word in itertools.pairwise(["", *words[command:]]):
        if _QUOTED_FLAG.match(word) or (" --" in word and not has_flags):
            raise ConfigError(
                f"a launch line wants separate words, not some in quotes: -- python3 train.py --flag value; found {word!r}"
            )
        is_variable = _VARIABLE.fullmatch(word) and not before.startswith("--")  # else it is the value of a flag
        if is_variable or _UNEXPANDED.fullmatch(word):
            raise ConfigError(f"a launch line wants words that a shell has expanded, found {word}")
    if not has_flags:
        raise ConfigError(
            f"a launch line wants slime's flags, found {' '.join(words[command:])}: flags within a script are not read"
        )
    script = next((n for n, word in enumerate(words) if n >= command and word.endswith(".py")), command)
    return words[script:]


def read_flags(words: Sequence[str]) -> dict[str, str]:
    """Returns the flags on a launch line, as a mapping from the name of slime's argument to the value of the flag.

    The key :data:`SCRIPT` holds the file name of the script, such as ``train.py``, if one comes before the first flag.

    Raises:
        ConfigError: the launch line names two custom config files; slime would read only the last.
    """
    line: dict[str, str] = {}
    for word, after in itertools.pairwise([*words, ""]):
        flag, equals, value = word.partition("=")
        if not equals:
            value = after
        key = flag.removeprefix("--").replace("-", "_")
        if key == "custom_config_path" and os.path.abspath(line.get(key, value)) != os.path.abspath(value):
            raise ConfigError(
                f"slime reads one --custom-config-path, found {line[key]} and {value}: put their keys into one"
            )
        if flag.startswith("--"):
            line[key] = value
        elif word.endswith(".py") and not line:
            line[SCRIPT] = os.path.basename(word)
    return line


def enabled_features(flags: Flags) -> Iterator[tuple[str, Any, SlimeHooks]]:
    """Yields the name, the flags and the :class:`SlimeHooks` of each feature that is turned on and supports slime."""
    for feature in FEATURES:
        if feature.slime and flags.requested(feature) != "off":
            yield feature.name, flags[feature], feature.slime


def idle_notes(args: Any, flags: Flags, file: Mapping[str, str]) -> list[str]:
    """Returns a log line for each feature that is enabled by name and has nothing to do in this run.

    Looks only at features with this ``file`` (see :class:`~rl_accel.features.SlimeHooks`): ``SLIME_MEGATRON`` for features of the
    training processes, ``SLIME_DATA`` for features of rollouts. slime's ``args`` must not have passed :func:`set_arguments` yet.
    """
    notes = []
    for name, section, hooks in enabled_features(flags):
        if section.enable and all(hooks.file.get(key) == path for key, path in file.items()):
            reason = _idle_training(args, hooks) if file == SLIME_MEGATRON else _idle_rollouts(args, name, flags)
            if reason:
                notes.append(f"{name} has nothing to do here: {reason}")
    return notes


def _idle_training(args: Any, hooks: SlimeHooks) -> str:
    """Returns the reason why training calls no advantage function that a feature replaces; "" if it does."""
    if getattr(args, "debug_rollout_only", False):
        return "--debug-rollout-only trains nothing"
    if not getattr(args, "compute_advantages_and_returns", True):
        return "--disable-compute-advantages-and-returns is set"
    estimator = getattr(args, "advantage_estimator", None)
    if path := getattr(args, "custom_advantage_function_path", None):
        estimator = f"--custom-advantage-function-path {path} in its place"
    if estimator in (None, *hooks.estimators):
        return ""
    return f"it serves --advantage-estimator {' or '.join(hooks.estimators)}, found {estimator}"


def _idle_rollouts(args: Any, name: str, flags: Flags) -> str:
    """Returns the reason why nothing is generated, or, for ``sampler``, why slime aborts no request; "" if it does, or may do."""
    function = getattr(args, "rollout_function_path", None)
    for key in ("load_debug_rollout_data", "debug_train_only"):  # slime sets the second with the first
        if getattr(args, key, None):
            return f"{flag_of(key)} generates nothing"
    if function == FINE_TUNING:
        return f"--rollout-function-path {function} generates nothing"
    if name != SAMPLER.name:
        return ""
    if flags.requested(TAIL_BATCHING) != "off":
        return "tail_batching aborts requests itself"
    if function == FULLY_ASYNC:
        return f"--rollout-function-path {function} aborts no request"
    size = getattr(args, "rollout_batch_size", None)
    over_sampling = getattr(args, "over_sampling_batch_size", None)
    is_exact = over_sampling in (None, size) and getattr(args, "dynamic_sampling_filter_path", None) is None
    if size is None or not is_exact or function not in (None, STOCK["rollout_function_path"]):
        return ""
    return (
        "slime aborts no request without --dynamic-sampling-filter-path or an --over-sampling-batch-size above"
        f" --rollout-batch-size, {size}"
    )


def restore_init_function(args: Any, line: Mapping[str, str]) -> list[str]:
    """Sets ``args.custom_megatron_init_path`` back to the user's function, if the launch line names one.

    The YAML file has replaced that function by rl-accel's. ``line`` is the result of :func:`read_flags`. Returns log lines: one if
    the argument was set back.
    """
    ((key, our_path),) = SLIME_MEGATRON.items()
    user_path = line.get(key, our_path)
    if user_path == our_path or getattr(args, key, None) != our_path:
        return []
    setattr(args, key, user_path)
    return [f"{flag_of(key)} {user_path} is called after ours"]


def set_arguments(args: Any, flags: Flags, line: Mapping[str, str]) -> list[str]:
    """Sets slime's arguments ``args`` to the values that the enabled features need.

    ``line`` is the result of :func:`read_flags`.

    Returns:
        Log lines. Each names a flag without effect, a function of the user that rl-accel's function now calls, or a feature that
        stays off, because it does not fit the launch line and is not enabled by name.

    Raises:
        ConfigError: the launch line conflicts with a feature. The message names slime's argument, the wanted and the found value.
    """
    notes = [*flags.warnings]
    source = line.get("data_source_path")
    args.data_source_path = STOCK["data_source_path"] if source in (None, *SLIME_DATA.values()) else source
    for name, section, hooks in enabled_features(flags):
        if not section.enable and (keys := [key for key in hooks.only_named_with if getattr(args, key, None)]):
            args.rl_accel = {**(getattr(args, "rl_accel", None) or {}), name: False}
            notes.append(f"{name} stays off with {flag_of(keys[0])}; rl_accel.{name}.enable turns it on")
            continue
        if hooks.is_on_policy and line.get(SCRIPT) == ASYNC_SCRIPT:
            reason = "it generates a batch before the last update, which is not strictly on-policy"
            refuse(f"rl_accel.{name}", "the script", "train.py", ASYNC_SCRIPT, reason)
        for key, wanted in {**hooks.engine(section), **dict.fromkeys(hooks.unset)}.items():
            if wanted is None:
                found = getattr(args, key, None)
            else:  # SGLang's parser accepts abbreviated flags
                named = [value for flag, value in line.items() if flag.startswith("sglang_") and key.startswith(flag)]
                found = named[0] if named else wanted
            if str(found) != str(wanted):
                refuse(f"rl_accel.{name}", flag_of(key), "unset" if wanted is None else wanted, found)
        kept_flags = section
        for key, our_path in hooks.arguments.items():
            user_path = getattr(args, key, None)
            if isinstance(our_path, list):
                setattr(args, key, list(dict.fromkeys([*(user_path or []), *our_path])))
                continue
            if user_path not in (None, our_path, STOCK.get(key)):
                kept_flags, note = _keep_users_function(args, name, section, key, user_path)
                notes.append(note)
            setattr(args, key, our_path)
        if hooks.check:
            function_at(hooks.check)(args, kept_flags)
    return notes


def _keep_users_function(args: Any, name: str, section: Any, key: str, path: str) -> tuple[Any, str]:
    """Keeps the user's function ``path`` elsewhere in ``args``, because the feature ``name`` needs its place, the argument ``key``.

    ``section`` has the flags of the feature. Returns the flags from now on, and a log line. Raises ConfigError if there is no other
    place for the function.
    """
    if key == LOG_FUNCTION:
        args.rl_accel_kept = {**getattr(args, "rl_accel_kept", {}), key: path}
        return section, f"{flag_of(key)} {path} is called after ours"
    if key == "custom_rm_path" and section.grader in (None, path):
        sections = getattr(args, "rl_accel", None) or {}
        given = sections.get(name) or {}
        values = given if isinstance(given, Mapping) else {"enable": given}
        args.rl_accel = {**sections, name: {**values, "grader": path}}
        return replace(section, grader=path), f"{flag_of(key)} {path} is now rl_accel.reward_timeout.grader"
    refuse(f"rl_accel.{name}", flag_of(key), getattr(section, "grader", "unset"), path)


def function_at(path: str) -> Callable[..., Any]:
    """Imports and returns the function with the dotted path ``path``."""
    module, _, name = path.rpartition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def flag_of(key: str) -> str:
    """Returns the command-line flag that sets slime's argument ``key``, such as ``--rollout-function-path``."""
    return "--" + key.replace("_", "-")
