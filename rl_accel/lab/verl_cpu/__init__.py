"""Support for real verl on a machine without an accelerator, with ``VERL_PLATFORM=cpu`` and ``rollout.name=hf_cpu``.

The package is inactive unless the environment variable ``VERL_USE_EXTERNAL_MODULES`` names :mod:`rl_accel.lab.verl_cpu.plugin`. In
this case, every process that imports verl calls :func:`activate`.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_accel.telemetry.server_counters import Reading

PLATFORM = "cpu"
ROLLOUT = "hf_cpu"
WORKER_PYTHON = "RL_ACCEL_WORKER_PYTHON"
"""Environment variable with the command with which Ray starts worker processes, in place of ``python``.

verl's trainer ignores a command that does not begin with the trainer's own Python interpreter."""

_OPTIONS = {
    "seconds_per_step": (int | float, 0, 10, "a number from 0 to 10"),
    "kv_tokens": (int, 2, math.inf, "a whole number of at least 2"),
    "weight_tokens": (int, 0, math.inf, "a whole number of at least 0"),
}
"""Options of the engine in ``rollout.engine_kwargs.hf_cpu``: type, bounds, and both in words."""

_ENVIRONMENT = {
    "VERL_ENGINE_DEVICE": "cuda",  # the FSDP engine that verl registers for cuda also runs on a CPU
    "OMP_NUM_THREADS": "1",  # Ray's workers share the cores; one thread fixes the order of sums
    "TOKENIZERS_PARALLELISM": "false",
}

_active = False


def activate() -> None:
    """Registers the CPU platform and the ``hf_cpu`` rollout with verl, and schedules the patches of verl for a CPU. Idempotent.

    Must run before verl looks up its platform. Each patch is applied when the module that it changes is imported. Environment
    variables that are already set keep their values.

    Raises:
        PatchRefused: a patch does not fit this version of verl. Raised later, when the module to patch is imported.
    """
    global _active
    if _active:
        return
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)

    from verl.plugin.platform.platform_manager import PlatformRegistry

    from rl_accel.integrations.verl import engines
    from rl_accel.lab.verl_cpu import sglang, vllm
    from rl_accel.lab.verl_cpu.patches import SWITCHES
    from rl_accel.lab.verl_cpu.platform import PlatformCPU
    from rl_accel.patches.patch import Patch
    from rl_accel.post_import import when_imported

    def apply_when_imported(patch: Patch) -> None:
        when_imported(patch.target.partition(":")[0], lambda _module: patch.apply())

    vllm.activate()
    sglang.activate()
    PlatformRegistry.register(PLATFORM)(PlatformCPU)
    engines.register(
        ROLLOUT,
        engines.EngineSupport(
            aborts_by_id=True,
            restarts_in_run=True,
            read_counters=_read_counters,
            stop=_stop,
            cache_tokens=lambda server: server._engine.kv_tokens,
            seeds_by_position=True,
        ),
    )
    when_imported("verl.workers.rollout.base", _register_adapter)
    when_imported("verl.workers.rollout.replica", _register_replica)
    for patch in SWITCHES:
        apply_when_imported(patch)
    _active = True


def find_option_problems(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields ``(key, reason)`` for each wrong key or value in ``options``, which is verl's ``rollout.engine_kwargs.hf_cpu``."""
    for key, value in options.items():
        if key not in _OPTIONS:
            yield key, f"hf_cpu takes {', '.join(_OPTIONS)}, found {key}"
            continue
        kind, least, most, wanted = _OPTIONS[key]
        if not (value is None or (isinstance(value, kind) and not isinstance(value, bool) and least <= value < most)):
            yield key, f"hf_cpu.{key} wants {wanted}, found {value!r}"


def read_model(get: Callable[..., Any]) -> Any:
    """Returns transformers' configuration of the model that verl trains; None if it cannot be read, which verl reports itself.

    ``get(key, default)`` returns the value of a setting.
    """
    from transformers import AutoConfig

    trusted = get("actor_rollout_ref.model.trust_remote_code", False)
    with contextlib.suppress(OSError, ValueError):
        return AutoConfig.from_pretrained(get("actor_rollout_ref.model.path"), trust_remote_code=trusted)
    return None


def _register_adapter(base: ModuleType) -> None:
    base._ROLLOUT_REGISTRY[(ROLLOUT, "async")] = "rl_accel.lab.verl_cpu.rollout.CPUServerAdapter"


def _register_replica(replica: ModuleType) -> None:
    def load() -> type:
        from rl_accel.lab.verl_cpu.rollout import CPURolloutReplica

        return CPURolloutReplica

    replica.RolloutReplicaRegistry.register(ROLLOUT, load)


def _stop(server: Any, request_id: str) -> None:
    server._engine.abort(request_id)


def _read_counters(servers: Sequence[str]) -> Mapping[str, "Reading | None"]:
    from rl_accel.lab.verl_cpu.rollout import read_counters

    return read_counters(servers)
