"""Reads flags from all sources and checks the flags against the dataclasses that the features declare.

Sources, each of which overrides the ones before: the defaults, the environment variables ``RL_ACCEL`` (names of features) and
``RL_ACCEL_CONFIG`` (inline YAML/JSON or a path), the framework's own configuration (verl: ``+rl_accel.gae.enable=True``), arguments
of :func:`rl_accel.enable`.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_accel.errors import ConfigError, did_you_mean, first_line, one_line
from rl_accel.features import FEATURES, F, Feature, LosslessFlags

NAMES_VAR = "RL_ACCEL"
ENV_VAR = "RL_ACCEL_CONFIG"

AUTO = "auto"
_AUTO_HELP = "turn on the lossless features that work here (what a bare rl_accel.enable() does)"

Requested = Literal["by name", "automatically", "off"]
Source = tuple[str, Mapping[str, Any]]
"""A source of flags: name for error messages, and flags. Example: ``("RL_ACCEL_CONFIG", {"gae": {"backend": "numba"}})``."""


@dataclass(frozen=True)
class Flags:
    """All flags, merged from all sources. ``flags[GAE].backend`` is the flag ``backend`` of the feature ``GAE``."""

    auto: bool  # every feature with LosslessFlags is on, unless a source sets its flag enable to False
    sections: Mapping[str, Any]  # mapping from feature name to the feature's flags (a dataclass instance)
    warnings: tuple[str, ...] = ()  # one line for each flag that is set for a feature that no source turns on or off

    def __getitem__(self, feature: Feature[F]) -> F:
        section: F = self.sections[feature.name]
        return section

    def requested(self, feature: Feature[Any]) -> Requested:
        """Returns "by name" if the flag ``enable`` of ``feature`` is True, "automatically" if ``auto`` turns the feature on, else
        "off"."""
        enable = self.sections[feature.name].enable
        if enable:
            return "by name"
        return "automatically" if enable is None and self.auto and issubclass(feature.flags, LosslessFlags) else "off"


def resolve(sources: Sequence[Source]) -> Flags:
    """Merges the flags of all sources with the default flags. A later source in ``sources`` overrides the earlier ones.

    Raises ConfigError if a key is unknown, a value has the wrong type or is out of range, or flags contradict each other.
    """
    auto = False
    values_of: dict[str, dict[str, Any]] = {feature.name: {} for feature in FEATURES}
    sources_of: dict[str, list[str]] = {feature.name: [] for feature in FEATURES}
    for source, flags in sources:
        for key, value in as_mapping(flags, source).items():
            if key == AUTO:
                if not isinstance(value, bool):
                    raise ConfigError(f"{source}: rl_accel.{AUTO} wants bool, found {_describe(value)}")
                auto = value
                continue
            name, dot, flag = key.partition(".")  # {"gae.backend": "numba"} is {"gae": {"backend": "numba"}}
            if name not in values_of:
                raise ConfigError(f"{source}: unknown key {_unknown('rl_accel', key, (AUTO, *values_of))}")
            values_of[name] |= _checked_section(name, {flag: value} if dot else value, source)
            sources_of[name].append(source)
    sections = {feature.name: feature.flags(**values_of[feature.name]) for feature in FEATURES}
    for name, section in sections.items():
        if hasattr(section, "validate"):
            try:
                section.validate()
            except ValueError as error:
                named = " and ".join(dict.fromkeys(sources_of[name]))
                raise ConfigError(f"{named}: rl_accel.{name}: {error}") from error
    warnings = [
        f"rl_accel.{feature.name}.{flag} has no effect without rl_accel.{feature.name}.enable"
        for feature in FEATURES
        if sections[feature.name].enable is None and not (auto and issubclass(feature.flags, LosslessFlags))
        for flag in values_of[feature.name]
        if flag != "enable"
    ]
    return Flags(auto, sections, tuple(warnings))


def as_mapping(flags: Any, source: str) -> dict[str, Any]:
    """Returns ``flags`` as a dict with string keys; {} for None. OmegaConf configurations become dicts, nested ones too.

    Raises ConfigError, which names ``source``, if ``flags`` is not a mapping or an interpolation of OmegaConf cannot be resolved.
    """
    if isinstance(flags, DictConfig):
        try:
            flags = OmegaConf.to_container(flags, resolve=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{source}: rl_accel: {first_line(error)}") from error
    if flags is None:
        return {}
    if not isinstance(flags, Mapping):
        raise ConfigError(f"{source}: rl_accel wants a mapping of flags, found {_describe(flags)}")
    return {str(key): value for key, value in flags.items()}


def read_names() -> dict[str, bool]:
    """Returns ``{name: True}`` for each feature named in the environment variable ``RL_ACCEL`` (names separated by commas)."""
    return {name.strip(): True for name in os.environ.get(NAMES_VAR, "").split(",") if name.strip()}


def read_environment() -> dict[str, Any]:
    """Returns the flags in the environment variable ``RL_ACCEL_CONFIG``: YAML or JSON text, or the path of such a file.

    Raises ConfigError if the file cannot be read, or the text is not a mapping in YAML or JSON.
    """
    value = os.environ.get(ENV_VAR, "")
    if not value.strip():
        return {}
    if not re.search(r"[{\n]|:(\s|$)", value):
        try:
            value = Path(value).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{ENV_VAR}={value!r} is neither inline YAML nor a readable file: {error}") from error
    try:
        parsed = OmegaConf.create(value)
    except Exception as error:  # yaml and OmegaConf raise unrelated classes for text that is not YAML
        raise ConfigError(f"{ENV_VAR} is not valid YAML or JSON: {one_line(error)}") from error
    return as_mapping(parsed, ENV_VAR)


def describe_flags() -> list[tuple[str, str, str]]:
    """Returns ``(dotted key, default value as JSON, help text)`` for every flag: ``auto`` first, then feature by feature."""
    every = [(f"{feature.name}.{f.name}", f) for feature in FEATURES for f in fields(feature.flags)]
    return [(AUTO, "false", _AUTO_HELP), *((key, json.dumps(f.default), f.metadata["help"]) for key, f in every)]


def _checked_section(name: str, flags: Any, source: str) -> dict[str, Any]:
    if isinstance(flags, bool):
        flags = {"enable": flags}
    if not isinstance(flags, Mapping):
        raise ConfigError(f"{source}: rl_accel.{name} wants true, false or a mapping, found {_describe(flags)}")
    (schema,) = (feature.flags for feature in FEATURES if feature.name == name)
    known = {f.name: f for f in fields(schema)}
    for key in flags:
        if key not in known:
            raise ConfigError(f"{source}: unknown key {_unknown(f'rl_accel.{name}', key, known)}")
    return {key: _checked(value, known[key], f"{source}: rl_accel.{name}.{key}") for key, value in flags.items()}


def _checked(value: Any, flag: Field[Any], where: str) -> Any:
    limits = flag.metadata
    if type(value) is int and _fits(0.0, flag.type):
        value = float(value)
    if not _fits(value, flag.type):
        kind = str(getattr(flag.type, "__name__", None) or flag.type).replace("None", "null").replace(" | ", " or ")
        raise ConfigError(f"{where} wants {kind}, found {_describe(value)}")
    if value is None:
        return value
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where} wants a finite number, found {value!r}")
    choices = limits.get("choices")
    if choices is not None and value not in choices:
        raise ConfigError(f"{where} wants one of {', '.join(choices)}, found {value!r}{did_you_mean(value, choices)}")
    low = limits.get("minimum")
    high = limits.get("maximum")
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        bounds = f"at least {low}" if high is None else f"a value between {low} and {high}"
        raise ConfigError(f"{where} wants {bounds}, found {value!r}")
    return value


def _fits(value: Any, kind: Any) -> bool:
    """Returns whether ``value`` has ``kind``, the declared type of a flag. A bool is no int, and an int is no float."""
    if isinstance(kind, UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    return type(value) is kind


def _unknown(section: str, key: Any, known: Iterable[str]) -> str:
    return f"{section}.{key}{did_you_mean(key, known, f'{section}.')}; {section} takes {', '.join(known)}"


def _describe(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"
