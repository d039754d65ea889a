"""Support for real verl on a machine without an accelerator, with ``VERL_PLATFORM=cpu`` and ``rollout.name=hf_cpu``.

The package is inactive unless the environment variable ``VERL_USE_EXTERNAL_MODULES`` names :mod:`rl_accel.lab.verl_cpu.plugin`. In
this case, every process that imports verl calls :func:`activate`.
"""

import os
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_accel.telemetry.server_counters import Reading

PLATFORM = "cpu"
ROLLOUT = "hf_cpu"
WORKER_PYTHON = "RL_ACCEL_WORKER_PYTHON"
"""Environment variable with the command with which Ray starts worker processes, in place of ``python``.

verl's trainer ignores a command that does not begin with the trainer's own Python interpreter."""

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
