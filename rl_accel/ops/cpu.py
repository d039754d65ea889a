"""What CPU kernels need: compiled code, kept on disk and never out of date, and threads to run it.

Compiled kernels do plain IEEE arithmetic and release the interpreter lock. numba's own parallel layer is not used: its
default backend ends the process when two Python threads enter it at once, and its OpenMP one when the process has forked.
Both happen inside a Ray actor.
"""

import contextlib
import functools
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core.caching import FunctionCache

from rl_accel.ops.inputs import usable_cores

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


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(usable_cores(), thread_name_prefix="rl_accel")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a parent's threads do not exist in its child


def run(tasks: Iterable[Callable[[], None]], threads: int) -> None:
    """Run ``tasks`` on ``threads`` threads, this one among them; return when all are done; raise the first error."""
    waiting = deque(tasks)

    def work() -> None:
        # taken one by one, so that a thread that the system holds up holds up nobody else
        while waiting:
            try:
                task = waiting.popleft()
            except IndexError:
                return
            task()

    others = [_pool().submit(work) for _ in range(min(threads, len(waiting)) - 1)]
    try:
        work()
    finally:
        # tasks write into memory that the caller owns, so none may outlive this call
        errors = [other.exception() for other in others]
    for error in errors:
        if error is not None:
            raise error
