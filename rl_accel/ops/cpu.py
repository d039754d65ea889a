"""Compiler and threads for CPU kernels.

Compiled kernels use plain IEEE arithmetic and release the interpreter lock. numba's own parallel layer is not used. Its default
backend ends the process when two Python threads enter the layer at once, and its OpenMP backend ends the process after a fork. Both
situations occur inside a Ray actor.
"""

import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numba
from numba.core.caching import FunctionCache

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


class _Cache(FunctionCache):  # type: ignore[misc]
    """Disk cache of compiled kernels, in which a damaged file or a full disk costs a compilation."""

    def load_overload(self, *args: Any) -> Any:
        try:
            return super().load_overload(*args)
        except Exception:  # the damaged bytes may be a pickle or machine code
            with contextlib.suppress(OSError):
                self.flush()

    def save_overload(self, *args: Any) -> None:
        with contextlib.suppress(OSError):
            super().save_overload(*args)


def compiled(function: Kernel) -> Kernel:
    """Compiles a Python function to a CPU kernel, and caches the machine code on disk if possible.

    The kernel releases the interpreter lock and uses plain IEEE arithmetic. numba renews the cache if the file of the kernel has
    changed, so a kernel must not use constants or kernels of other files.
    """
    jitted: Any = numba.njit(nogil=True, error_model="numpy", fastmath=False)(function)
    with contextlib.suppress(RuntimeError):  # no folder for the cache is writable, neither this file's nor the user's
        jitted._cache = _Cache(function)
    kernel: Kernel = jitted
    return kernel


def run(tasks: Iterable[Callable[[], None]], threads: int) -> None:
    """Runs ``tasks`` on ``threads`` new threads, or on the calling thread if ``threads`` is 1. Raises the first error of a task."""
    if threads == 1:
        for task in tasks:
            task()
        return
    with ThreadPoolExecutor(threads) as pool:
        # tasks write into memory that the caller owns: the pool waits for all of them, whatever happens
        started = [pool.submit(task) for task in tasks]
    for each in started:
        each.result()
