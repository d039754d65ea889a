"""Support for real verl on a machine without an accelerator, with ``VERL_PLATFORM=cpu`` and ``rollout.name=hf_cpu``.

The package is inactive unless the environment variable ``VERL_USE_EXTERNAL_MODULES`` names :mod:`verl_on_cpu.plugin`. In
this case, every process that imports verl calls :func:`activate`.
"""

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any

ENGINE = "hf_cpu"
ROLLOUT = "actor_rollout_ref.rollout"
"""Section of verl's configuration for the rollout."""
Get = Callable[..., Any]
"""Function ``get(key, default)`` that returns the value of a setting of verl."""
Problems = Iterator[tuple[str, str]]
"""Pairs ``(override, reason)``: an argument for verl that corrects a setting, and the reason why the setting fails on a CPU."""

_ENVIRONMENT = {
    "VERL_ENGINE_DEVICE": "cuda",  # the FSDP engine that verl registers for cuda also runs on a CPU
    "OMP_NUM_THREADS": "1",  # Ray's workers share the cores; one thread fixes the order of sums
    "TOKENIZERS_PARALLELISM": "false",
}


@functools.cache
def activate() -> None:
    """Registers the CPU platform and the ``hf_cpu`` rollout with verl, and schedules the patches of verl for a CPU. Idempotent.

    Must run before verl looks up its platform. Each patch is applied when the module that it changes is imported. Environment
    variables that are already set keep their values.

    Raises:
        PatchRefused: a patch does not fit this version of verl. Raised later, when the module to patch is imported.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)

    from verl.plugin.platform.platform_manager import PlatformRegistry

    from rl_accel.integrations.verl import engines
    from rl_accel.post_import import when_imported
    from verl_on_cpu import sglang, vllm
    from verl_on_cpu.patches import SWITCHES
    from verl_on_cpu.platform import PlatformCPU

    vllm.activate()
    sglang.activate()
    PlatformRegistry.register("cpu")(PlatformCPU)
    engines.register(
        ENGINE,
        engines.EngineSupport(
            aborts_by_id=True,
            restarts_in_run=True,
        ),
    )
    adapter = {(ENGINE, "async"): "verl_on_cpu.rollout.CPUServerAdapter"}
    when_imported("verl.workers.rollout.base", lambda base: base._ROLLOUT_REGISTRY.update(adapter))
    when_imported(
        "verl.workers.rollout.replica",
        lambda module: module.RolloutReplicaRegistry.register(ENGINE, lambda: _from_rollout("CPURolloutReplica")),
    )
    for patch in SWITCHES:
        when_imported(patch.target.partition(":")[0], lambda _, patch=patch: patch.apply())  # type: ignore[misc]


def find_option_problems(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields ``(key, reason)`` for each wrong key or value in ``options``, verl's section ``rollout.engine_kwargs.hf_cpu``."""
    for key, value in options.items():
        if key != "seconds_per_step":
            yield key, f"hf_cpu takes seconds_per_step, found {key}"
        elif value is not None and (type(value) not in (int, float) or not 0 <= value < 10):
            yield key, f"hf_cpu.{key} wants a number from 0 to 10, found {value!r}"


def read_model(get: Get) -> Any:
    """Returns transformers' configuration of the model that verl trains; None if unreadable, an error that verl itself reports."""
    from transformers import AutoConfig

    trusted = get("actor_rollout_ref.model.trust_remote_code", False)
    with contextlib.suppress(OSError, ValueError):
        return AutoConfig.from_pretrained(get("actor_rollout_ref.model.path"), trust_remote_code=trusted)
    return None


def longest_request(get: Get) -> int:
    """Returns the maximum number of tokens of a prompt and its response together, according to verl's settings."""
    both = get(f"{ROLLOUT}.prompt_length", 0) + get(f"{ROLLOUT}.response_length", 0)
    return int(get(f"{ROLLOUT}.max_model_len", both))


def wanted(get: Get, key: str, allowed: tuple[Any, ...], reason: str, prefix: str = "") -> Problems:
    """Yields a problem unless verl's setting ``key`` has one of the ``allowed`` values. The override sets the first of these.

    None in ``allowed``: the key may be absent. ``prefix``: hydra's ``+`` or ``++``, for a key that verl's configuration may lack.
    """
    if get(key) not in allowed:
        yield f"{prefix}{key}={allowed[0]}", reason


def version_of(distribution: str) -> str | None:
    """Returns the version of an installed ``distribution``; None if it is not installed."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution)
    return None


def _from_rollout(name: str) -> Any:
    return getattr(importlib.import_module("verl_on_cpu.rollout"), name)
