"""``rollout.name=sglang`` on a CPU: makes SGLang's ordinary package, which is built for GPUs, work with verl and torch's CPU
operators.

The package imports other packages that exist for GPUs only. :func:`activate` replaces them by stubs, also in the processes that
SGLang starts. It also changes the transfer of weights from verl's trainer to SGLang, which assumes tensors on a GPU.
"""

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from packaging.version import Version

from rl_accel.integrations.gpu_packages import require, stand_in
from rl_accel.post_import import when_imported
from verl_on_cpu import ROLLOUT, Get, Problems, longest_request, version_of, wanted

TRIED = ("0.5.12.post1", "0.5.15.post1")
"""Tested versions of SGLang, oldest first: the one that verl pins and the one in slime's image."""

ENGINE_KWARGS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "enable_memory_saver": False,
}
"""Values that verl's section ``rollout.engine_kwargs.sglang`` must contain, so that SGLang's server starts on a CPU."""

_KWARGS = f"{ROLLOUT}.engine_kwargs.sglang"

installed_version = partial(version_of, "sglang")


def activate() -> None:
    """Makes SGLang work on a CPU in this process. Does nothing if SGLang is missing, or older or newer than :data:`TRIED`.

    Raises:
        PatchRefused: SGLang lacks a function that must be patched. Raised later, by the import of the function's module.
    """
    oldest, newest = map(Version, TRIED)
    is_tried = oldest <= Version(installed_version() or "0") <= newest
    if not is_tried or not stand_in():
        return
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    when_imported("sglang.srt.utils.patch_torch", _send_cpu_tensors)
    when_imported("sglang.srt.utils.common", _name_requests)
    when_imported("sglang.srt.layers.logits_processor", _pin_no_memory)
    when_imported("sglang.srt.entrypoints.engine", _prepare_children)


def _send_cpu_tensors(patch_torch: Any) -> None:
    """Lets SGLang send CPU tensors to other processes. SGLang's own function expects a device index, which CPU tensors lack."""
    require(patch_torch, "_modify_tuple", "monkey_patch_torch_reductions")
    from torch import multiprocessing

    share_by: Callable[[str], None] = multiprocessing.set_sharing_strategy
    share_by("file_system")  # files are found by name; file descriptors need a common key
    original = patch_torch._modify_tuple

    def _modify_tuple(t: tuple[Any, ...], index: int, modifier: Callable[[Any], Any]) -> Any:
        return original(t, index, modifier) if index < len(t) else t

    patch_torch._modify_tuple = _modify_tuple


def _name_requests(common: Any) -> None:
    """Makes SGLang's metrics name an HTTP request by the path in the URL. SGLang's own function fails with FastAPI's routers."""
    require(common, "_get_fastapi_request_path")
    # SGLang's function reads ``path`` of the matching route, which FastAPI's routers lack
    common._get_fastapi_request_path = lambda request: (request.url.path, True)


class _Unpinned(ModuleType):
    """Replacement for the module ``torch`` with a function ``tensor`` that ignores the argument ``pin_memory``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["torch"], name)

    def tensor(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return sys.modules["torch"].tensor(*args, **kwargs)


def _pin_no_memory(logits_processor: Any) -> None:
    """Keeps SGLang's logits processor from pinning memory, which fails without a GPU."""
    require(logits_processor, "torch")
    logits_processor.torch = _Unpinned("torch")  # used when SGLang continues a preempted request


def _prepare_children(engine: Any) -> None:
    require(engine, *_CHILDREN)
    for name in _CHILDREN:
        setattr(engine, name, _Child(name))


_CHILDREN = {
    "run_scheduler_process": "sglang.srt.managers.scheduler",
    "run_detokenizer_process": "sglang.srt.managers.detokenizer_manager",
}


class _Child:
    """Replacement for the main function of a child process of SGLang. Calls :func:`activate`, then the original function.

    The child process calls ``activate`` as early as when it unpickles this object. After that, it unpickles the arguments of the
    function, which import SGLang.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> Any:
        return _main_of_child, (self._name,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _main_of_child(self._name)(*args, **kwargs)


def _main_of_child(name: str) -> Any:
    activate()
    return getattr(importlib.import_module(_CHILDREN[name]), name)


def find_problems(get: Get) -> Problems:
    """Yields a problem for each setting of verl that fails with SGLang on a CPU."""
    # This imports prometheus_client. In SGLang's servers, SGLang itself must be the first to do so.
    from rl_accel.integrations.verl import engines

    version = installed_version()
    if reason := engines.version_problem("SGLang", version, TRIED):
        yield f"{ROLLOUT}.name=hf_cpu", f"SGLang {reason}; `make sglang` builds its environment"
        return
    yield from wanted(get, f"{ROLLOUT}.free_cache_engine", (False,), "SGLang frees memory of a GPU only")
    for key, value in ENGINE_KWARGS.items():
        reason = "SGLang's server does not start on a CPU otherwise"
        yield from wanted(get, f"{_KWARGS}.{key}", (value,), reason, "++")
    max_tokens = longest_request(get)
    key = f"{_KWARGS}.max_total_tokens"
    if get(key, 0) <= max_tokens:
        yield f"++{key}={max_tokens + 1}", f"one request may need {max_tokens} tokens"
