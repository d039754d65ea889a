"""The one typed schema of every flag, whatever source a flag comes from.

Sources, weakest first: the defaults below, the environment variable ``RL_ACCEL_CONFIG`` (inline YAML/JSON or a path),
the framework's own configuration (verl: ``+rl_accel.gae.enable=True``), keyword arguments of :func:`rl_accel.enable`.
"""

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_accel.errors import ConfigError

ENV_VAR = "RL_ACCEL_CONFIG"
BACKENDS = ("auto", "naive", "chunk", "numba", "triton")
ISOLATION = ("auto", "process", "bubblewrap")
TP_ACTIONS = ("advise", "restart", "live")


def _flag(default: Any, help: str, **limits: Any) -> Any:
    return field(default=default, metadata={"help": help, **limits})


_ENABLE_HELP = "True: on, and an error if it cannot be; False: off; null: on only where lossless features are automatic"


@dataclass
class GaeConfig:
    """Chunk-scan GAE in place of the token-by-token loop. Lossless."""

    enable: bool | None = _flag(None, _ENABLE_HELP)
    backend: str = _flag("auto", "kernel; auto is numba on CPU tensors and triton on CUDA tensors", choices=BACKENDS)
    chunk_size: int | None = _flag(None, "tokens a chunk for backend=chunk; null chooses", minimum=1)
    threads: int | None = _flag(None, "CPU threads of the numba kernel; null: usable cores, at most 16", minimum=1)


@dataclass
class AdvantagesConfig:
    """Vectorised twins of the other per-token and per-sample advantage loops. Lossless."""

    enable: bool | None = _flag(None, _ENABLE_HELP)


@dataclass
class SamplerConfig:
    """Adaptive waiting for finished rollouts in place of a fixed 2-second poll. Lossless."""

    enable: bool | None = _flag(None, _ENABLE_HELP)
    max_cpu_share: float = _flag(0.05, "largest share of one core that polling may cost", minimum=0.001, maximum=1.0)
    max_delay_s: float = _flag(
        0.02, "seconds added at most after the last needed response while a poll is cheap", minimum=0.001, maximum=60.0
    )


@dataclass
class TailBatchingConfig:
    """Rounds that end with the first prompts to complete. Changes which samples are trained on, so it is never automatic."""

    enable: bool | None = _flag(None, "True: on, and an error if it cannot be; False or null: off")
    prompt_ratio: float | str = _flag(
        1.25, "prompts launched in short rounds over those trained, or auto", minimum=1.0, words=("auto",)
    )
    response_ratio: float = _flag(
        1.25, "responses launched in short rounds over those trained; 1 is unbiased", minimum=1.0
    )
    queue_threshold: int | None = _flag(None, "deferred prompts that make a long round; null: a whole batch", minimum=1)
    max_deferrals: int = _flag(1, "a prompt cut off this often waits for a long round", minimum=1)
    max_retries: int = _flag(2, "how often a failed response is generated again", minimum=0)
    auto_limit: float = _flag(2.0, "the largest ratio that prompt_ratio=auto may take", minimum=1.0)
    domain_quotas: dict[str, int] | None = _flag(  # noqa: RUF009 (a field, and null is no dict)
        None, "prompts of each domain in a batch; null: as the data comes"
    )
    domain_key: str = _flag("data_source", "the column of the data set that names a row's domain")


@dataclass
class RewardTimeoutConfig:
    """Executions that end soon after correct ones have, and are killed then. Changes rewards, so it is never automatic."""

    enable: bool | None = _flag(None, "True: on, and an error if it cannot be; False or null: off")
    scale: float = _flag(1.5, "the limit over the longest correct execution of the test case", minimum=1.0)
    slack: float = _flag(0.5, "seconds added to the limit", minimum=0.0)
    minimum: float = _flag(2.0, "the least limit, in seconds", minimum=0.0)
    maximum: float = _flag(30.0, "the greatest limit, in seconds, and the limit while little is known", minimum=0.001)
    min_correct: int = _flag(1, "correct executions of a test case before its limit adapts", minimum=1)
    probe_share: float = _flag(
        0.02, "share of executions that get the greatest limit all the same", minimum=0.0, maximum=1.0
    )
    correct_above: float = _flag(0.0, "a score above this is of a correct answer (its `acc`, if it has one)")
    timeout_score: float = _flag(0.0, "the score of an answer whose execution was stopped")
    early_stop: bool = _flag(False, "leave out the test cases after the first that fails")
    workers: int | None = _flag(
        None, "executions at once in each reward process; null: its share of the cores", minimum=1
    )
    grader: str | None = _flag(None, "slime: dotted path of the grader that --custom-rm-path named; null: by --rm-type")
    isolation: str = _flag("auto", "of programs under test; auto takes the best that works", choices=ISOLATION)
    memory_mb: int = _flag(1024, "memory of a program under test, in MiB", minimum=16)


@dataclass
class TelemetryConfig:
    """The stage clock: where a step's time goes. Changes nothing, but speeds nothing up either, so it is never automatic."""

    enable: bool | None = _flag(None, "True: on, and an error if it cannot be; False or null: off")


@dataclass
class TpReplanConfig:
    """A tensor-parallel size that follows preemptions. It changes how responses are batched, so it is never automatic."""

    enable: bool | None = _flag(None, "True: on, and an error if it cannot be; False or null: off")
    action: str = _flag(
        "advise",
        "advise: say what would be better; restart: save, stop, start anew; live: new servers within the run",
        choices=TP_ACTIONS,
    )
    threshold: float = _flag(1.05, "preemptions over their reference from which on TP doubles", minimum=1.0)
    calm_steps: int = _flag(4, "steps in a row without a preemption after which TP halves", minimum=1)
    cooldown: int = _flag(4, "steps after a change in which none is asked for", minimum=0)
    min_tp: int = _flag(1, "the smallest size", minimum=1)
    max_tp: int | None = _flag(None, "the largest size; null: a node", minimum=1)
    memory_gb: float | None = _flag(None, "GiB of one GPU; null: memory bounds nothing", minimum=0.1)
    memory_share: float | None = _flag(
        None, "share of it for rollout; null: the framework's own setting", minimum=0.01, maximum=1.0
    )
    min_sequences: int = _flag(4, "sequences of the greatest length that a server's cache must hold", minimum=1)
    gpus_per_node: int | None = _flag(None, "null: what the framework says", minimum=1)
    max_changes: int = _flag(6, "changes in a run, one of which is kept for rolling back", minimum=0)
    reference_steps: int = _flag(10, "steps that the reference of a round kind remembers", minimum=1)
    confirm_steps: int = _flag(2, "latest steps, the least of which is held against the reference", minimum=1)
    least_reference: float = _flag(10.0, "fewer preemptions than this count as this", minimum=1.0)
    kv_limit: float = _flag(0.9, "TP halves only if the cache would be no fuller", minimum=0.0, maximum=1.0)
    check_steps: int = _flag(3, "steps of each round kind after a change before it is judged", minimum=2)
    check_limit: int = _flag(20, "steps after which it is judged by the round kinds that came", minimum=1)
    slower: float = _flag(0.03, "rise of rollout seconds per token that has a change rolled back", minimum=0.0)
    retry_steps: int = _flag(25, "steps until the same change is tried again; doubles each time", minimum=1)
    config_file: str | None = _flag(
        None, "slime: the file for its --sglang-config that advice writes; null: rl_accel_sglang_config.yaml in --save"
    )


@dataclass
class RlAccelConfig:
    """All flags. A section is a feature; ``auto`` turns on every automatic feature whose ``enable`` is null."""

    auto: bool = _flag(False, "turn on the lossless features that work here (what a bare rl_accel.enable() does)")
    gae: GaeConfig = field(default_factory=GaeConfig)
    advantages: AdvantagesConfig = field(default_factory=AdvantagesConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    tail_batching: TailBatchingConfig = field(default_factory=TailBatchingConfig)
    reward_timeout: RewardTimeoutConfig = field(default_factory=RewardTimeoutConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    tp_replan: TpReplanConfig = field(default_factory=TpReplanConfig)


Layer = tuple[str, Mapping[str, Any]]
"""Where flags come from, in words for messages, and the flags themselves as nested plain mappings."""


def resolve(layers: Sequence[Layer]) -> RlAccelConfig:
    """Merge ``layers``, weakest first, over the defaults.

    Raises:
        ConfigError: a key is unknown, a value has the wrong type or is out of range; names the source and the key.
    """
    config = OmegaConf.structured(RlAccelConfig)
    for source, flags in layers:
        _merge(config, RlAccelConfig, normalise(flags, source), source, "")
    resolved = OmegaConf.to_object(config)
    assert isinstance(resolved, RlAccelConfig)
    return resolved


def normalise(flags: Any, source: str) -> dict[str, Any]:
    """Return ``flags`` as nested plain dicts, ``gae: true`` written out as ``gae: {enable: true}``."""
    if isinstance(flags, DictConfig):
        flags = OmegaConf.to_container(flags, resolve=True)
    if flags is None:
        return {}
    if not isinstance(flags, Mapping):
        raise ConfigError(f"{source}: rl_accel wants a mapping of flags, found {_describe(flags)}")
    sections = {f.name for f in fields(RlAccelConfig) if is_dataclass(f.type)}
    return {
        str(key): {"enable": value} if key in sections and isinstance(value, bool) else value
        for key, value in flags.items()
    }


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
    return normalise(parsed, ENV_VAR)


def describe_flags() -> list[tuple[str, str, str]]:
    """Return every flag as ``(dotted key, default as JSON, help)``, in the order of the schema."""
    return list(_walk(RlAccelConfig, ""))


def _walk(schema: type, prefix: str) -> Any:
    for f in fields(schema):
        if is_dataclass(f.type):
            yield from _walk(f.type, f"{prefix}{f.name}.")  # type: ignore[arg-type]
        else:
            yield f"{prefix}{f.name}", json.dumps(f.default), f.metadata["help"]


def _merge(config: DictConfig, schema: type, flags: Mapping[str, Any], source: str, prefix: str) -> None:
    known = {f.name: f for f in fields(schema)}
    for key, value in flags.items():
        name = f"{prefix}{key}"
        if key not in known:
            raise ConfigError(f"{source}: unknown key rl_accel.{name}{_nearest(name)}; {_choices(known, prefix)}")
        spec = known[key]
        if is_dataclass(spec.type):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{source}: rl_accel.{name} wants true, false or a mapping, found {_describe(value)}")
            _merge(config[key], spec.type, value, source, f"{name}.")  # type: ignore[arg-type]
        else:
            _set(config, key, value, spec.type, spec.metadata, f"{source}: rl_accel.{name}")


def _set(config: DictConfig, key: str, value: Any, wanted: Any, limits: Mapping[str, Any], where: str) -> None:
    kind = str(getattr(wanted, "__name__", None) or wanted).replace("None", "null").replace(" | ", " or ")
    if isinstance(value, bool) and "bool" not in kind:  # OmegaConf would read True as 1
        raise ConfigError(f"{where} wants {kind}, found {_describe(value)}")
    if isinstance(value, int | float) and not isinstance(value, bool) and ("bool" in kind or kind == "str"):
        raise ConfigError(f"{where} wants {kind}, found {_describe(value)}")
    if isinstance(value, int) and not isinstance(value, bool) and "float" in kind:
        value = float(value)  # OmegaConf does so for a float, but not for a union with one
    try:
        config[key] = value
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where} wants {kind}, found {_describe(value)}") from error
    checked = config[key]
    if checked is None or checked in limits.get("words", ()):
        return
    if "words" in limits and isinstance(checked, str):
        raise ConfigError(f"{where} wants a number or {' or '.join(limits['words'])}, found {_describe(checked)}")
    if "choices" in limits and checked not in limits["choices"]:
        raise ConfigError(
            f"{where} wants one of {', '.join(limits['choices'])}, found {checked!r}{_hint(checked, limits)}"
        )
    low, high = limits.get("minimum"), limits.get("maximum")
    if (low is not None and not checked >= low) or (high is not None and not checked <= high):
        bounds = f"at least {low}" if high is None else f"a value between {low} and {high}"
        raise ConfigError(f"{where} wants {bounds}, found {checked!r}")


def _hint(value: Any, limits: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(str(value), limits["choices"], n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _nearest(name: str) -> str:
    every = [key for key, _, _ in describe_flags()] + [f.name for f in fields(RlAccelConfig)]
    close = difflib.get_close_matches(name, every, n=1, cutoff=0.5)
    return f" (did you mean rl_accel.{close[0]}?)" if close else ""


def _choices(known: Mapping[str, Any], prefix: str) -> str:
    return f"rl_accel{'.' + prefix.rstrip('.') if prefix else ''} takes {', '.join(known)}"


def _describe(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"
