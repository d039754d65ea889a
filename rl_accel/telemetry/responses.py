"""What is noted of one response: when it began, was generated, got its reward, and how it ended."""

import time
from collections import deque
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any

COMPLETED, CANCELLED, FAILED = "completed", "cancelled", "failed"
MOST = 200_000
"""Notes that a process holds if nobody fetches them."""


@dataclass(slots=True)
class Response:
    """One response. Times are seconds of the wall clock, so that notes of several processes can be compared.

    Attributes:
        prompt: its prompt group.
        began: its agent loop began.
        generated: its last token was there; None if it never was.
        rewarded: its reward was there; None if it never was.
        ended: nothing of it was under way any more.
        tokens: how many were generated; None if unknown.
        server: the rollout server that generated it (the last one, in several turns); None if unknown.
        outcome: ``completed``, ``cancelled`` or ``failed``.
    """

    prompt: str
    began: float
    generated: float | None = None
    rewarded: float | None = None
    ended: float = 0.0
    tokens: int | None = None
    server: str | None = None
    outcome: str = COMPLETED


NAMES = tuple(field.name for field in fields(Response))

CURRENT: ContextVar[Response | None] = ContextVar("rl_accel_response", default=None)
"""The response that the running task works on."""


class Notebook:
    """The notes of one process until they are fetched; the oldest go if nobody does."""

    def __init__(self, most: int = MOST) -> None:
        self._notes: deque[Response] = deque(maxlen=most)

    def begin(self, prompt: str) -> Response:
        """Return a note of a response that begins now."""
        return Response(prompt, time.time())

    def end(self, note: Response, outcome: str) -> None:
        """Keep ``note`` of a response that ends now."""
        note.ended, note.outcome = time.time(), outcome
        self._notes.append(note)

    def take(self) -> list[tuple[Any, ...]]:
        """Return the notes since the last call as tuples in the order of :data:`NAMES`, which travel cheaply."""
        taken = [tuple(getattr(note, name) for name in NAMES) for note in self._notes]
        self._notes.clear()
        return taken
