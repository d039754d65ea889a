"""Implementation of verl's platform interface for a machine without an accelerator."""

import contextlib
import types
from collections.abc import Callable
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: value


def _device_module() -> types.ModuleType:
    """Returns a module for verl to use as ``torch.cuda``: functions of ``torch.cpu``, and functions with constant results."""
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
        setattr(module, name, _always(value))
    module.manual_seed = module.manual_seed_all = torch.manual_seed  # type: ignore[attr-defined]
    module.get_rng_state = lambda *_: torch.get_rng_state()  # type: ignore[attr-defined]
    module.set_rng_state = lambda state, *_: torch.set_rng_state(state)  # type: ignore[attr-defined]
    return module


class PlatformCPU(PlatformBase):
    """Implementation of verl's platform interface on CPU cores."""

    device_name = vendor_name = "cpu"
    device_module = _device_module()

    is_available = _always(True)
    is_ipc_supported = _always(False)
    # verl moves tensors to this device; an int, as in the base class, would mean cuda:N
    current_device = _always("cpu")
    device_count = _always(1)
    get_device_capability = _always((None, None))
    communication_backend_name = _always("gloo")
    visible_devices_envvar = _always("CUDA_VISIBLE_DEVICES")
    ray_resource_name = _always("GPU")  # verl checks only the resources GPU and NPU before it starts workers
    ray_noset_envvars = _always([])
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    nvtx_range = _always(contextlib.nullcontext())
    set_device = synchronize = set_allocator_settings = empty_cache = cudart = _always(None)
    profiler_start = profiler_stop = _always(None)
