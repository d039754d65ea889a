"""What an agent-loop worker knows of the responses it is making."""

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass

from rl_accel.rollout.driver import TokenRate


@dataclass(eq=False)
class Session:
    """A response in the making, in the process that makes it."""

    response_id: int
    task: "asyncio.Task[None] | None" = None
    tokens: int = 0
    keys: tuple[str, ...] = ()
    metric: float | None = None
    generating: bool = False
    storing: bool = False
    cancelled: bool = False


SESSION: ContextVar[Session | None] = ContextVar("session", default=None)
"""The response that the running task works on; None in validation."""


TOKEN_RATE = TokenRate()
