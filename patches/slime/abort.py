"""Shorter waits between the requests for a server's load after slime has told the server to abort all requests.

The first load is mostly not zero yet, because SGLang ends a request after the next token. slime then sleeps 3 seconds, and aborts
and asks again. With the patch, the first sleep takes 0.05 seconds, and each further sleep twice as long, up to slime's 3 seconds.
slime's own code runs in a copy of the function with another ``asyncio.sleep``. Its log still says ``retrying in 3 seconds``.
"""

import ast
import asyncio
import inspect
from types import FunctionType, SimpleNamespace
from typing import Any

from rl_accel.errors import PatchRefused
from rl_accel.patches.patch import Patch

FIRST_SLEEP = 0.05
"""Seconds of the first sleep after an abort: about the time of one token, after which requests have ended. Chosen by hand."""


def _make(original: Any, _settings: Any) -> Any:
    async def abort_server_until_idle(*args: Any, **kwargs: Any) -> Any:
        next_sleep = FIRST_SLEEP

        async def sleep(longest: float) -> None:
            nonlocal next_sleep
            seconds = min(next_sleep, longest)
            next_sleep *= 2
            await asyncio.sleep(seconds)

        names = {**original.__globals__, "asyncio": SimpleNamespace(**{**vars(asyncio), "sleep": sleep})}
        copy = FunctionType(original.__code__, names, original.__name__, original.__defaults__, original.__closure__)
        copy.__kwdefaults__ = original.__kwdefaults__
        return await copy(*args, **kwargs)

    return abort_server_until_idle


def _probe(original: Any, _replacement: Any, _settings: Any) -> None:
    """Raises PatchRefused unless slime's function has one sleep, of ``retry_interval`` seconds, by default over ``FIRST_SLEEP``."""
    nodes = ast.walk(ast.parse(inspect.getsource(original.__code__)))
    calls = [ast.unparse(node) for node in nodes if isinstance(node, ast.Call)]
    sleeps = [call for call in calls if "sleep" in call.partition("(")[0]]
    # The patch replaces every sleep in the function.
    if len(sleeps) != 1 or not sleeps[0].startswith("asyncio.sleep(") or "retry_interval" not in sleeps[0]:
        raise PatchRefused(f"wanted one asyncio.sleep, of retry_interval, found {', '.join(sleeps) or 'none'}")
    interval = inspect.signature(original).parameters["retry_interval"].default
    if interval <= FIRST_SLEEP:
        raise PatchRefused(f"slime sleeps only {interval} s itself")


SWITCHES = (
    Patch(
        name="slime.abort",
        target="slime.backends.sglang_utils.server_control:abort_server_until_idle",
        params=("url", "retry_interval", "*"),
        make=_make,
        fingerprints=(
            "48440b6f2c79509f69440e2e6bb55e757ee6aebbbb800c14975ff48c151035cb",
            "3dc10d0d92fbc3c4e5695f00243755511269c83a39bb7f0dbac9e2a5429bd555",  # with a time limit
        ),
        probe=_probe,
        no_seam="the interval is a default value that no argument of slime sets",
        remove_when="slime's first interval is short",
    ),
)
