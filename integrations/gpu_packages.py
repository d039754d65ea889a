"""Stubs of packages that SGLang imports and that exist for GPUs only, so that SGLang can be imported on a machine without a GPU."""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from rl_accel.errors import PatchRefused
from rl_accel.post_import import when_imported

GPU_ONLY = ("sgl_kernel", "torchvision", "torchaudio", "torchao")
"""Packages that SGLang imports, but that have no build for a CPU version of torch."""


def stand_in() -> bool:
    """Replaces packages of :data:`GPU_ONLY` by stubs in this process, if they are not installed, once SGLang is imported.

    Returns whether this call did it; False if an earlier call has.
    """
    if any(isinstance(finder, _Stubs) for finder in sys.meta_path):
        return False
    sys.meta_path.insert(0, _Stubs())
    when_imported("sglang.srt.configs.utils", _skip_images)
    return True


def require(module: Any, *names: str) -> None:
    """Raises PatchRefused if SGLang's ``module`` lacks one of ``names``."""
    for name in names:
        if not hasattr(module, name):
            raise PatchRefused(f"this SGLang has no {module.__name__}.{name}, which the CPU platform repairs")


class _Stubs(MetaPathFinder, Loader):
    """Import finder that replaces packages of :data:`GPU_ONLY` by stubs if they are not installed, once SGLang is imported."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname == "sglang" and not self._names:
            from transformers.utils import import_utils

            for package in ("torchvision", "torchaudio", "torchao"):
                getattr(import_utils, f"is_{package}_available")()  # remembers that there is no such package
            self._names = [name for name in GPU_ONLY if PathFinder.find_spec(name) is None]
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] in self._names else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


class _Stub(ModuleType):
    """Empty replacement for a module that is not installed. Every attribute is a class whose call raises RuntimeError."""

    def __getattr__(self, name: str) -> type:
        return _stub_class(self.__name__, name)


class _StubClass(type):
    def __getattr__(cls, name: str) -> type:
        return _stub_class(f"{cls.__module__}.{cls.__name__}", name)

    def __call__(cls, *_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError(f"{cls.__module__}.{cls.__name__} needs a GPU; there is none here")


def _stub_class(owner: str, name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(f"{owner} has no attribute {name!r}")
    return _StubClass(name, (), {"__module__": owner})


def _skip_images(utils: Any) -> None:
    require(utils, "register_image_processor")
    utils.register_image_processor = lambda *_: None  # transformers has no image processors without torchvision
