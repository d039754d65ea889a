"""What an agent-loop worker knows of the responses it is making."""

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass


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


@dataclass
class Speed:
    """Tokens and seconds of the responses that ran to their end in this process."""

    tokens: int = 0
    seconds: float = 0.0

    def estimate(self, seconds: float) -> int:
        """Return how many tokens a response had after ``seconds``, if it ran like those; 0 if none did yet."""
        return int(seconds * self.tokens / self.seconds) if self.seconds else 0


SPEED = Speed()
