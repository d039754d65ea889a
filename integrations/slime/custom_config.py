"""Command ``rl-accel slime-config``: writes or checks the YAML file for slime's ``--custom-config-path``.

slime does not check the keys of this file. A check may include the launch line, which is the command that starts the job.
"""

import argparse
import contextlib
import copy
import difflib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_accel import config as cfg
from rl_accel.console import refuse_idle_options
from rl_accel.errors import ConfigError, did_you_mean, one_line
from rl_accel.features import FEATURES, SLIME_DATA, SLIME_MEGATRON
from rl_accel.integrations.gpu_packages import stand_in
from rl_accel.integrations.slime.hooks import require_functions, require_values
from rl_accel.integrations.slime.launch_line import (
    STOCK,
    enabled_features,
    flag_of,
    idle_notes,
    read_flags,
    restore_init_function,
    set_arguments,
    words_of_flags,
)
from rl_accel.runtime import is_installed

SECTION = "rl_accel"
STOPS = "train.py itself stops"
"""Beginning of a message about an error with which slime would stop the run. ``rl-accel slime-config`` then exits with code 1."""
SLIME_ARGUMENTS = {feature.name: feature.slime.arguments for feature in FEATURES if feature.slime is not None}
"""Mapping from feature name to the slime arguments that the feature sets, see :attr:`~rl_accel.features.SlimeHooks.arguments`."""
_ASSUMED_ARGUMENTS = {
    **STOCK,
    "advantage_estimator": "grpo",
    "partial_rollout": False,
    "rollout_global_dataset": True,
    **dict.fromkeys(("over_sampling_batch_size", "rollout_batch_size", "buffer_filter_path")),
    "debug_train_only": True,  # without a launch line, engine settings are unknown
}
"""Values of slime's arguments that :func:`check` assumes if it gets no launch line, which would set them."""
_MISSPELT_ABOVE = 0.92
"""Similarity (0 to 1) to a flag of slime from which on an unknown flag counts as misspelt. The correct flags of Megatron-LM, which
slime's parser does not know either, have at most 0.86."""
_FLAG = re.compile("[-\N{EN DASH}\N{EM DASH}]+(?=[A-Za-z])")
"""Pattern of the dashes before a flag. Long dashes match, too, because text editors may put one in place of ``--``."""


def make(features: Iterable[str], settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the content of the YAML file that turns ``features`` on in slime.

    ``settings`` maps the name of a feature to a mapping from flag name to value.

    Raises:
        ConfigError: a feature or flag is unknown, flags contradict each other, or a feature does not support slime.
    """
    flags: dict[str, Any] = {name: {"enable": True} for name in features}
    for name, values in settings.items():
        flags.setdefault(name, {}).update(values)
    for name in flags:
        if name not in SLIME_ARGUMENTS:
            is_other = name in {feature.name for feature in FEATURES}
            unknown = f"unknown feature {name!r}{did_you_mean(name, SLIME_ARGUMENTS)}"
            problem = f"{name} has no part for slime" if is_other else unknown
            raise ConfigError(f"{problem}; there are {', '.join(SLIME_ARGUMENTS)}")
    resolved = cfg.resolve([("slime-config", flags)])
    require_values(resolved)
    content: dict[str, Any] = {}
    for _, section, hooks in enabled_features(resolved):
        content.update({**hooks.file, **hooks.engine(section)})
    return {**content, SECTION: flags}


def check(path: Path, slime_root: Path | None = None, line: Sequence[str] | None = None) -> list[str]:
    """Checks ``path``, the YAML file for slime's ``--custom-config-path``.

    Returns the messages that a run with this file would log, and a warning for each key that is not a flag of slime.

    Args:
        slime_root: checkout of slime in which the keys are looked up; None: keys are not looked up.
        line: words of the launch line, which slime's own parser then checks together with the file; None for no launch line.

    Raises:
        ConfigError: the file cannot be read or lacks a value that a feature needs, a flag of rl-accel is wrong, or the launch line
            conflicts with a feature.
    """
    content = _read(path)
    keys = list(content)
    if SECTION not in content:
        close = difflib.get_close_matches(SECTION, keys, n=1)
        raise ConfigError(f"{path} has no {SECTION} section" + (f"; is {close[0]} meant for it?" if close else ""))
    flags = cfg.resolve([(str(path), content[SECTION])])
    require_values(flags)
    for name, section, hooks in enabled_features(flags):
        for key, wanted in {**hooks.file, **hooks.engine(section)}.items():
            if content.get(key) != wanted:
                raise ConfigError(f"{path}: {SECTION}.{name} wants {key}: {wanted}, found {content.get(key)}")
    if line is None:
        warnings = set_arguments(SimpleNamespace(**{**_ASSUMED_ARGUMENTS, **content}), flags, {})
    else:
        named = read_flags(line)
        named_file = named.setdefault("custom_config_path", str(path))
        if not _is_file(named_file, path):
            raise ConfigError(
                f"slime reads one --custom-config-path, found {named_file} and {path}: put their keys into one"
            )
        args, warnings = parsed([*line, f"--custom-config-path={path}"], content)
        warnings += messages_of_run(args, flags, named, idle=not _stops(warnings))
        require_functions(cfg.resolve([(str(path), args.rl_accel)]))  # set_arguments may have changed args.rl_accel
        if SLIME_MEGATRON in [hooks.file for *_, hooks in enabled_features(flags)]:
            warnings += _inits_of_roles(args)
    known = arguments_of(slime_root) if slime_root else {*keys}
    return warnings + [
        f"{key} is no flag of slime's own{did_you_mean(key, known)}; slime sets it all the same"
        if not key.startswith("sglang_") or "sglang_tp_size" in known
        else f"{key} was not looked up: SGLang is not installed here"
        for key in keys
        if key != SECTION and key not in known
    ]


def messages_of_run(args: Any, flags: cfg.Flags, named: Mapping[str, str], idle: bool) -> list[str]:
    """Returns the messages that a run with slime's arguments ``args`` would log, and raises what it would raise.

    ``named`` is the result of :func:`~rl_accel.integrations.slime.launch_line.read_flags`. ``idle``: whether to include messages
    about features that have nothing to do.
    """
    notes = [note for file in (SLIME_MEGATRON, SLIME_DATA) if idle for note in idle_notes(args, flags, file)]
    return [*notes, *restore_init_function(args, named), *set_arguments(args, flags, named)]


def _read(path: Path) -> dict[str, Any]:
    """Returns the content of a YAML file as slime reads it. Raises ConfigError if the file is not a mapping, or repeats a key."""
    try:
        text = path.read_text(encoding="utf-8")
        OmegaConf.create(text)  # refuses a key that appears twice, of which slime takes the last
        content: Any = yaml.safe_load(text) or {}  # as slime reads it: "${x}" and 1e-3 are plain text
    except Exception as error:  # yaml and OmegaConf raise unrelated classes
        raise ConfigError(f"{path} is not a readable YAML file: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} wants a mapping of slime's arguments, found {type(content).__name__}")
    return {str(key): value for key, value in content.items()}


def _inits_of_roles(args: Any) -> list[str]:
    """Returns a message for each role (actor, critic) whose init function in ``--megatron-config-path`` is not rl-accel's.

    Features that rl-accel's init function turns on would stay off in this role. If the file cannot be read, the message says so.
    """
    ((key, ours),) = SLIME_MEGATRON.items()
    if (path := args.megatron_config_path) is None:
        return []
    try:
        roles: Any = OmegaConf.to_container(OmegaConf.load(path))["megatron"]  # type: ignore[index,call-overload]
        inits = {role["role"]: (role.get("overrides") or role.get("args") or {}).get(key, ours) for role in roles}
    except Exception as error:  # no such file, or of another form
        return [f"{STOPS}: {path}: {one_line(repr(error))}"]
    wanted = f"must call {ours}, or nothing of the file is on there"
    return [f"{key} {init} of the {role} in {path} {wanted}" for role, init in inits.items() if init != ours]


def _is_file(written: str, path: Path) -> bool:
    """Returns whether ``written``, the value of a flag on a launch line, names the file ``path``.

    If an environment variable in ``written`` is not set, compares only the names of the files, without their folders.
    """
    named = Path(os.path.expandvars(written)).expanduser()
    return named.name == path.name if "$" in str(named) else named.resolve() == path.resolve()


@contextlib.contextmanager
def flags_unknown_to_parsers() -> Iterator[Callable[[], list[str]]]:
    """Context manager that yields a function, which returns the flags on the command line that slime would ignore.

    slime reads the command line with several parsers. A flag is ignored if each parser that ran in the ``with`` block skipped it.
    """
    unread: list[set[str]] = []
    known = argparse.ArgumentParser.parse_known_args

    def parse(*args: Any, **kwargs: Any) -> Any:
        namespace, unknown_words = known(*args, **kwargs)
        unread.append({word.partition("=")[0] for word in unknown_words if _FLAG.match(word)})
        return namespace, unknown_words

    argparse.ArgumentParser.parse_known_args = parse  # type: ignore[method-assign]
    try:
        yield lambda: sorted(set.intersection(*unread))
    finally:
        argparse.ArgumentParser.parse_known_args = known  # type: ignore[method-assign]


def parsed(line: Sequence[str], content: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Parses a launch line with slime's own parser. Returns slime's arguments and a list of messages.

    A message names a flag that slime would skip, or an error of slime's own checks. If Megatron-LM is not installed, its flags are
    unknown, and only a flag that resembles a flag of slime causes a message. A value that slime's parser refuses ends this process.

    Args:
        line: words of the launch line, including ``--custom-config-path``.
        content: content of the YAML file. slime reads the file itself; ``content`` is used only if slime's checks fail.

    Raises:
        ConfigError: slime or SGLang cannot be imported.
    """
    stand_in()
    try:
        from slime.utils import arguments as slimes
    except Exception as error:  # packages that do not fit each other raise other classes than ImportError
        raise ConfigError(
            f"a launch line wants slime (SLIME_ROOT) and SGLang importable here, found {one_line(repr(error))}"
        ) from error
    messages: list[str] = []
    has_megatron = is_installed("megatron.training")
    argv_before = sys.argv
    sys.argv = ["train.py", *line]
    try:
        with flags_unknown_to_parsers() as unread:
            parser = argparse.ArgumentParser(conflict_handler="resolve", allow_abbrev=False)
            args, _ = slimes.get_slime_extra_args_provider()(parser).parse_known_args()
            vars(args).update(vars(slimes._pre_parse_mode()))
            if not (args.debug_train_only or args.load_debug_rollout_data):
                vars(args).update(vars(slimes.sglang_parse_args()))
            checked = copy.deepcopy(args)
            try:
                if has_megatron:
                    checked = slimes.parse_args()
                else:
                    slimes.slime_validate_args(checked)
            except Exception as error:
                vars(args).update(content, debug_train_only=True)  # slime has computed no engine settings
                checked = args
                messages.append(f"{STOPS}: {type(error).__name__}: {error}")
        known = [*map(flag_of, vars(args))]
        for flag in unread():
            meant = _FLAG.sub("--", flag).replace("_", "-").lower()
            if has_megatron or difflib.get_close_matches(meant, known, cutoff=_MISSPELT_ABOVE):
                messages.append(f"{flag} is no flag of slime's{did_you_mean(meant, known)}; slime skips it")
        return checked, messages
    finally:
        sys.argv = argv_before


def arguments_of(slime_root: Path) -> set[str]:
    """Returns the names of slime's flags in the form that they have in the YAML file, such as ``rollout_batch_size``.

    Reads slime's source files, because importing slime needs packages that may be absent. If SGLang is installed, its flags, such
    as ``sglang_tp_size``, are included. Raises ConfigError if ``slime_root`` is no checkout of slime.
    """
    source = require_checkout(slime_root).read_text()
    flags = {flag.replace("-", "_") for flag in re.findall(r'"--([a-z0-9][a-z0-9-]*)"', source)}
    sglang = importlib.util.find_spec("sglang")
    for folder in (sglang.submodule_search_locations or ()) if sglang else ():
        sources = [Path(folder, "srt", "server_args.py"), *Path(folder, "srt", "arg_groups").rglob("*.py")]
        fields = (re.findall(r"^    (\w+): ", source.read_text(), re.MULTILINE) for source in sources)
        flags |= {f"sglang_{name}" for names in fields for name in names}
    return flags


def require_checkout(slime_root: str | Path) -> Path:
    """Returns the file that declares slime's flags. Raises ConfigError if ``slime_root`` is no checkout of slime."""
    arguments = Path(slime_root, "slime", "utils", "arguments.py")
    if not arguments.is_file():
        raise ConfigError(
            f"SLIME_ROOT wants a checkout of slime, found {str(slime_root)!r} (no slime/utils/arguments.py)"
        )
    return arguments


def _stops(warnings: Iterable[str]) -> bool:
    return any(warning.startswith(STOPS) for warning in warnings)


@click.command("slime-config")
@click.option("--enable", multiple=True, help="Features, with commas between them: " + ",".join(SLIME_ARGUMENTS))
@click.option(
    "--set", "settings", multiple=True, help="A further flag, such as tail_batching.prompt_ratio=1.5. May repeat."
)
@click.option("--check", "file", type=click.Path(path_type=Path), help="Check this file instead of writing one.")
@click.argument("line", nargs=-1)
def slime_config(enable: tuple[str, ...], settings: tuple[str, ...], file: Path | None, line: tuple[str, ...]) -> None:
    """Print the YAML that turns features on in slime: ``rl-accel slime-config --enable gae,tail_batching > rl_accel.yaml``,
    then ``--custom-config-path rl_accel.yaml``.

    slime itself accepts any key of the file, so ``--check FILE`` checks the ``rl_accel`` section as a run would. If SLIME_ROOT is
    set, the other keys are looked up in that checkout of slime. ``--check FILE -- python train.py ...`` reports the messages that a
    run with this launch line would log, and exits with 1 if slime would stop the run.
    """
    if file is not None:
        refuse_idle_options("with --check", "enable", "settings")
        root = os.environ.get("SLIME_ROOT")
        if root and root not in sys.path:
            sys.path.insert(0, root)
        warnings = check(file, Path(root) if root else None, words_of_flags(line) if line else None)
        for warning in warnings:
            click.echo(f"{file}: {warning}", err=True)
        if _stops(warnings):
            raise SystemExit(1)
        click.echo(f"{file} is right")
        return
    if line:
        raise ConfigError("a launch line goes with --check FILE")
    features = [name.strip() for name in ",".join(enable).split(",") if name.strip()]
    if not features:
        raise ConfigError(f"--enable wants features to turn on: {', '.join(SLIME_ARGUMENTS)}")
    content = make(features, _parse(settings))
    click.echo("# For slime's --custom-config-path. These keys override the command line's.")
    click.echo(OmegaConf.to_yaml(OmegaConf.create(content)), nl=False)


def _parse(settings: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    for setting in settings:
        if "=" not in setting or "." not in setting.partition("=")[0]:
            raise ConfigError(f"--set wants feature.flag=value, found {setting!r}")
    try:
        parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(settings)))
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"--set: {' '.join(str(error).split())}") from error
    return parsed  # type: ignore[no-any-return]
