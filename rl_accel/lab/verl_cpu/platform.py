"""Implementation of verl's platform interface for a machine without an accelerator."""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase


def _device_module() -> types.ModuleType:
    """Returns a module that replaces ``torch.cuda``: functions of ``torch.cpu``, and functions with constant results."""

    def always(value: Any) -> Callable[..., Any]:
        return lambda *_args, **_kwargs: value

    module = types.ModuleType("rl_accel_cpu_device")
    for name in ("Event", "Stream", "StreamContext", "current_stream", "stream", "synchronize", "is_initialized"):
        setattr(module, name, getattr(torch.cpu, name))
    constants: dict[str, Any] = {
        "current_device": 0,
        "device_count": 1,
        "empty_cache": None,
        "get_device_name": "cpu",
        "ipc_collect": None,
        "is_available": False,  # makes verl skip freeing the memory of an accelerator
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
        "mem_get_info": (0, 1),
        "memory_allocated": 0,
        "memory_reserved": 0,
        "reset_accumulated_memory_stats": None,
        "reset_peak_memory_stats": None,
        "set_device": None,
        "set_per_process_memory_fraction": None,
    }
    for name, value in constants.items():
        setattr(module, name, always(value))
    module.manual_seed = module.manual_seed_all = torch.manual_seed  # type: ignore[attr-defined]
    module.get_rng_state = lambda *_: torch.get_rng_state()  # type: ignore[attr-defined]
    module.set_rng_state = lambda state, *_: torch.set_rng_state(state)  # type: ignore[attr-defined]
    return module


class PlatformCPU(PlatformBase):
    """Implementation of verl's platform interface on CPU cores."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"  # verl moves tensors to this device; an int, as in the base class, would mean cuda:N

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"  # verl checks only the resources GPU and NPU before it starts workers

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
