"""Compiling CPU kernels: plain IEEE arithmetic, no interpreter lock, machine code kept on disk and never out of date."""

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core.caching import FunctionCache

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def _digest() -> str:
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()


_DIGEST = _digest()


class _Cache(FunctionCache):  # type: ignore[misc]
    """numba looks only at the file of the function itself. A kernel here uses constants and intrinsics of its neighbours,
    and code compiled for other ones would write past its memory, so that every file of the kernels counts."""

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), _DIGEST)


def compiled(function: Kernel) -> Kernel:
    """Compile without the interpreter lock and with plain IEEE arithmetic; keep the machine code on disk where possible."""
    jitted: Any = numba.njit(nogil=True, error_model="numpy", fastmath=False)(function)
    with contextlib.suppress(RuntimeError):  # no folder to cache in: neither beside this file nor in the user's cache
        jitted._cache = _Cache(function)
    kernel: Kernel = jitted
    return kernel
