"""``rl-accel slime-config``: writes the YAML file for slime's ``--custom-config-path``, and checks one.

slime itself takes any key of that file as it is.
"""

import difflib
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_accel import config as cfg
from rl_accel.errors import ConfigError
from rl_accel.features import FEATURES
from rl_accel.integrations.slime.hooks import require_values

SECTION = "rl_accel"
HOOKS = {feature.name: feature.slime.arguments for feature in FEATURES if feature.slime is not None}
"""By feature: slime's flags, as keys of the file, and the path each must have, or the paths that it must hold among others."""


def make(features: Iterable[str], settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of the file.

    Args:
        features: what to turn on.
        settings: further flags by feature.

    Raises:
        ConfigError: a feature or flag is unknown, flags contradict each other, or a feature has no part for slime.
    """
    content: dict[str, Any] = {}
    flags: dict[str, Any] = {}
    for name in features:
        _require_known(name)
        content.update(HOOKS[name])
        flags[name] = {"enable": True}
    for name, values in settings.items():
        _require_known(name)
        flags.setdefault(name, {}).update(values)
    resolved = cfg.resolve([("slime-config", flags)])
    require_values(resolved)
    for feature in FEATURES:
        if feature.slime is not None and resolved[feature].enable:
            content.update(feature.slime.engine(resolved[feature]))
    return {**content, SECTION: flags}


def _require_known(name: str) -> None:
    if name in HOOKS:
        return
    if name in {feature.name for feature in FEATURES}:
        raise ConfigError(f"{name} has no part for slime; there are {', '.join(HOOKS)}")
    raise ConfigError(f"unknown feature {name!r}{_hint(name, HOOKS)}; for slime there are {', '.join(HOOKS)}")


def _hint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def check(path: Path, slime_root: Path | None = None) -> list[str]:
    """Check a file and return warnings: keys that ``slime_root``, if given, has no flag for.

    Raises:
        ConfigError: the file cannot be read, a flag of ours is wrong, or a path that a feature needs is missing.
    """
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except Exception as error:  # yaml and OmegaConf raise unrelated classes
        raise ConfigError(f"{path} is not a readable YAML file: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} wants a mapping of slime's arguments, found {type(content).__name__}")
    keys = [str(key) for key in content]
    if SECTION not in content:
        close = difflib.get_close_matches(SECTION, keys, n=1)
        raise ConfigError(f"{path} has no {SECTION} section" + (f"; is {close[0]} meant for it?" if close else ""))
    flags = cfg.resolve([(str(path), content[SECTION])])
    require_values(flags)
    for feature in FEATURES:
        if feature.slime is None or not flags[feature].enable:
            continue
        for key, wanted in {**feature.slime.arguments, **feature.slime.engine(flags[feature])}.items():
            if not _has(content.get(key), wanted):
                raise ConfigError(f"{path}: {SECTION}.{feature.name} wants {key}: {wanted}, found {content.get(key)}")
    if slime_root is None:
        return []
    known = arguments_of(slime_root)
    return [
        f"{key} is no flag of slime's own{_hint(key, known)}; slime sets it all the same"
        if not key.startswith("sglang_") or "sglang_tp_size" in known
        else f"{key} was not looked up: SGLang is not installed here"
        for key in keys
        if key != SECTION and key not in known
    ]


def _has(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return isinstance(found, list) and set(wanted) <= set(found)
    return bool(found == wanted)


def arguments_of(slime_root: Path) -> set[str]:
    """Return slime's own flags, as keys of the file (``rollout_batch_size``), read from a checkout without importing it.

    With those that it hands on to SGLang (``sglang_tp_size``), if SGLang is installed here.

    Raises:
        ConfigError: there is no checkout.
    """
    arguments = slime_root / "slime" / "utils" / "arguments.py"
    if not arguments.is_file():
        raise ConfigError(
            f"SLIME_ROOT wants a checkout of slime, found {str(slime_root)!r} (no slime/utils/arguments.py)"
        )
    flags = {flag.replace("-", "_") for flag in re.findall(r'"--([a-z0-9][a-z0-9-]*)"', arguments.read_text())}
    sglang = importlib.util.find_spec("sglang")
    for folder in (sglang.submodule_search_locations or ()) if sglang else ():
        sources = [Path(folder, "srt", "server_args.py"), *Path(folder, "srt", "arg_groups").rglob("*.py")]
        fields = (re.findall(r"^    (\w+): ", source.read_text(), re.MULTILINE) for source in sources)
        flags |= {f"sglang_{name}" for names in fields for name in names}
    return flags


@click.command("slime-config")
@click.option("--enable", default="", help="Features, with commas between them: " + ",".join(HOOKS))
@click.option(
    "--set", "settings", multiple=True, help="A further flag, such as tail_batching.prompt_ratio=1.5. May repeat."
)
@click.option("--check", "file", type=click.Path(path_type=Path), help="Check this file instead of writing one.")
def slime_config(enable: str, settings: tuple[str, ...], file: Path | None) -> None:
    """Print the YAML that turns features on in slime: ``rl-accel slime-config --enable gae,tail_batching > rl_accel.yaml``,
    then ``--custom-config-path rl_accel.yaml``.

    slime itself takes any key of that file without a word, so ``--check FILE`` reads it as we do, and with SLIME_ROOT set looks
    its other keys up in that checkout.
    """
    if file is not None:
        root = os.environ.get("SLIME_ROOT")
        for warning in check(file, Path(root) if root else None):
            click.echo(f"{file}: {warning}", err=True)
        click.echo(f"{file} is right")
        return
    features = [name.strip() for name in enable.split(",") if name.strip()]
    if not features:
        raise ConfigError(f"--enable wants features to turn on: {', '.join(HOOKS)}")
    content = make(features, _parse(settings))
    click.echo("# For slime's --custom-config-path. These keys override the command line's.")
    click.echo(OmegaConf.to_yaml(OmegaConf.create(content)), nl=False)


def _parse(settings: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    for setting in settings:
        if "=" not in setting or "." not in setting.partition("=")[0]:
            raise ConfigError(f"--set wants feature.flag=value, found {setting!r}")
    try:
        parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(settings)))
    except OmegaConfBaseException as error:
        raise ConfigError(f"--set: {error}") from error
    return parsed  # type: ignore[no-any-return]
