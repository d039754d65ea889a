"""Reads flags from any source and checks them against the one schema that each feature declares.

Sources, weakest first: the defaults, the environment variable ``RL_ACCEL_CONFIG`` (inline YAML/JSON or a path), the
framework's own configuration (verl: ``+rl_accel.gae.enable=True``), keyword arguments of :func:`rl_accel.enable`.
"""

import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_accel.errors import ConfigError
from rl_accel.features import FEATURES, F, Feature

ENV_VAR = "RL_ACCEL_CONFIG"

AUTO = "auto"
_AUTO_HELP = "turn on the lossless features that work here (what a bare rl_accel.enable() does)"

Requested = Literal["by name", "automatically", "off"]
Layer = tuple[str, Mapping[str, Any]]
"""Where flags come from, in words for messages, and the flags themselves as nested plain mappings."""


@dataclass(frozen=True)
class Flags:
    """All flags in force. ``flags[GAE].backend`` is one of them; ``auto`` turns on every automatic feature not named."""

    auto: bool
    sections: Mapping[str, Any]

    def __getitem__(self, feature: Feature[F]) -> F:
        section: F = self.sections[feature.name]
        return section

    def requested(self, feature: Feature[Any]) -> Requested:
        """Say whether ``feature`` is on, and whether it was named."""
        enable = self.sections[feature.name].enable
        if enable:
            return "by name"
        return "automatically" if enable is None and self.auto and feature.automatic else "off"


def resolve(layers: Sequence[Layer]) -> Flags:
    """Merge ``layers``, weakest first, over the defaults.

    Raises:
        ConfigError: a key is unknown, a value has the wrong type or is out of range, or flags contradict each other.
    """
    auto = False
    sections = {feature.name: OmegaConf.structured(feature.flags) for feature in FEATURES}
    for source, flags in layers:
        for key, value in as_mapping(flags, source).items():
            if key == AUTO:
                if not isinstance(value, bool):
                    raise ConfigError(f"{source}: rl_accel.{AUTO} wants bool, found {_describe(value)}")
                auto = value
            elif key in sections:
                _merge(sections[key], _schema(key), value, source, key)
            else:
                raise ConfigError(
                    f"{source}: unknown key rl_accel.{key}{_nearest(key)}; rl_accel takes {', '.join((AUTO, *sections))}"
                )
    resolved: dict[str, Any] = {name: OmegaConf.to_object(section) for name, section in sections.items()}
    for name, section in resolved.items():
        if hasattr(section, "validate"):
            try:
                section.validate()
            except ValueError as error:
                raise ConfigError(f"{layers[-1][0]}: rl_accel.{name}: {error}") from error
    return Flags(auto, resolved)


def as_mapping(flags: Any, source: str) -> dict[str, Any]:
    """Return ``flags`` as nested plain dicts with strings as keys.

    Raises:
        ConfigError: they are no mapping.
    """
    if isinstance(flags, DictConfig):
        flags = OmegaConf.to_container(flags, resolve=True)
    if flags is None:
        return {}
    if not isinstance(flags, Mapping):
        raise ConfigError(f"{source}: rl_accel wants a mapping of flags, found {_describe(flags)}")
    return {str(key): value for key, value in flags.items()}


def read_environment(value: str | None = None) -> dict[str, Any]:
    """Parse ``RL_ACCEL_CONFIG``: inline YAML or JSON, or the path of a file with it. Empty or unset gives ``{}``.

    Raises:
        ConfigError: the file cannot be read, or the text is not a mapping.
    """
    value = os.environ.get(ENV_VAR, "") if value is None else value
    if not value.strip():
        return {}
    text = value
    if not any(sign in value for sign in ":{\n"):
        try:
            text = Path(value).expanduser().read_text()
        except OSError as error:
            raise ConfigError(f"{ENV_VAR}={value!r} is neither inline YAML nor a readable file: {error}") from error
    try:
        parsed = OmegaConf.create(text)
    except Exception as error:  # yaml and OmegaConf raise unrelated classes for text that is not YAML
        raise ConfigError(f"{ENV_VAR} is not valid YAML or JSON: {error}") from error
    return as_mapping(parsed, ENV_VAR)


def describe_flags() -> list[tuple[str, str, str]]:
    """Return every flag as ``(dotted key, default as JSON, help)``, in the order of the features."""
    return [(AUTO, "false", _AUTO_HELP), *((key, json.dumps(f.default), f.metadata["help"]) for key, f in _all_flags())]


def _all_flags() -> Iterator[tuple[str, Field[Any]]]:
    for feature in FEATURES:
        for f in fields(feature.flags):
            yield f"{feature.name}.{f.name}", f


def _schema(name: str) -> Any:
    return next(feature.flags for feature in FEATURES if feature.name == name)


def _merge(section: DictConfig, schema: Any, flags: Any, source: str, name: str) -> None:
    if isinstance(flags, bool):
        flags = {"enable": flags}
    if not isinstance(flags, Mapping):
        raise ConfigError(f"{source}: rl_accel.{name} wants true, false or a mapping, found {_describe(flags)}")
    known = {f.name: f for f in fields(schema)}
    for key, value in flags.items():
        if key not in known:
            raise ConfigError(
                f"{source}: unknown key rl_accel.{name}.{key}{_nearest(f'{name}.{key}')}; "
                f"rl_accel.{name} takes {', '.join(known)}"
            )
        _set(section, key, value, known[key], f"{source}: rl_accel.{name}.{key}")


def _set(section: DictConfig, key: str, value: Any, flag: Field[Any], where: str) -> None:
    limits = flag.metadata
    kind = str(getattr(flag.type, "__name__", None) or flag.type).replace("None", "null").replace(" | ", " or ")
    if isinstance(value, bool) and "bool" not in kind:  # OmegaConf would read True as 1
        raise ConfigError(f"{where} wants {kind}, found {_describe(value)}")
    if isinstance(value, int | float) and not isinstance(value, bool) and ("bool" in kind or kind == "str"):
        raise ConfigError(f"{where} wants {kind}, found {_describe(value)}")
    if isinstance(value, int) and not isinstance(value, bool) and "float" in kind:
        value = float(value)  # OmegaConf does so for a float, but not for a union with one
    try:
        section[key] = value
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where} wants {kind}, found {_describe(value)}") from error
    checked = section[key]
    if checked is None or checked in limits.get("words", ()):
        return
    if "words" in limits and isinstance(checked, str):
        raise ConfigError(f"{where} wants a number or {' or '.join(limits['words'])}, found {_describe(checked)}")
    if "choices" in limits and checked not in limits["choices"]:
        close = difflib.get_close_matches(str(checked), limits["choices"], n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError(f"{where} wants one of {', '.join(limits['choices'])}, found {checked!r}{hint}")
    low, high = limits.get("minimum"), limits.get("maximum")
    if (low is not None and not checked >= low) or (high is not None and not checked <= high):
        bounds = f"at least {low}" if high is None else f"a value between {low} and {high}"
        raise ConfigError(f"{where} wants {bounds}, found {checked!r}")


def _nearest(name: str) -> str:
    names = [AUTO, *(feature.name for feature in FEATURES), *(key for key, _ in _all_flags())]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" (did you mean rl_accel.{close[0]}?)" if close else ""


def _describe(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"
