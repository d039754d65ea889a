"""Who executes next: a bounded number at once, fair between prompts, the shortest expected first."""

import asyncio
import contextlib
import heapq
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from time import monotonic

_Waiting = tuple[float, int, "asyncio.Future[None]"]
"""When it would end had it begun when it came, its number, and the future that is done when it has a slot."""


class FairScheduler:
    """Grants ``slots`` slots. Use it from one event loop.

    A free slot goes to the prompt that holds the fewest; among those to the execution with the fewest expected seconds, less the
    seconds that it has waited, so that none waits for ever. A prompt with a late execution counts as holding two slots fewer: the
    result of one more of its executions may show that the late one is to be stopped. Amortised O(log n) a slot.
    """

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"slots must be at least 1, found {slots!r}")
        self._free = slots
        self._held: Counter[str] = Counter()
        self._late: Counter[str] = Counter()
        self._queues: dict[str, list[_Waiting]] = {}
        # (standing, head of its queue, prompt); entries that no longer tell the truth are dropped when they come up.
        self._offers: list[tuple[int, float, int, str]] = []
        self._numbers = itertools.count()
        self._waiting = 0

    def __len__(self) -> int:
        """How many wait."""
        return self._waiting

    @contextlib.asynccontextmanager
    async def slot(self, prompt: str, expected: float) -> AsyncIterator[Callable[[], None]]:
        """Hold a slot for ``prompt`` within the block, which is expected to take ``expected`` seconds.

        What it yields is to be called, once, if the execution is late.
        """
        await self._take(prompt, expected)
        late = []

        def is_late() -> None:
            late.append(True)
            self._late[prompt] += 1
            self._offer(prompt)
            self._give_out()

        try:
            yield is_late
        finally:
            if late:
                self._late[prompt] -= 1
                if not self._late[prompt]:
                    del self._late[prompt]
            self._give_back(prompt)

    async def _take(self, prompt: str, expected: float) -> None:
        granted = asyncio.get_running_loop().create_future()
        waiting = (monotonic() + expected, next(self._numbers), granted)
        heapq.heappush(self._queues.setdefault(prompt, []), waiting)
        self._waiting += 1
        self._offer(prompt)
        self._give_out()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._waiting -= 1  # its place in the queue goes when it comes up
            else:  # it had got its slot, and was cancelled before it could run
                self._give_back(prompt)
            raise

    def _give_back(self, prompt: str) -> None:
        self._free += 1
        self._held[prompt] -= 1
        if not self._held[prompt]:
            del self._held[prompt]
        self._offer(prompt)
        self._give_out()

    def _offer(self, prompt: str) -> None:
        """Put the head of the prompt's queue up for a slot. To be called after its queue or its slots have changed."""
        queue = self._queues.get(prompt, [])
        while queue and queue[0][2].done():
            heapq.heappop(queue)
        if queue:
            heapq.heappush(self._offers, (self._standing(prompt), *queue[0][:2], prompt))
        else:
            self._queues.pop(prompt, None)

    def _standing(self, prompt: str) -> int:
        return self._held[prompt] - (2 if prompt in self._late else 0)

    def _give_out(self) -> None:
        while self._free and self._offers:
            standing, _, number, prompt = heapq.heappop(self._offers)
            queue = self._queues.get(prompt, [])
            if not queue or standing != self._standing(prompt) or number != queue[0][1]:
                continue
            granted = queue[0][2]
            if not granted.done():
                heapq.heappop(queue)
                granted.set_result(None)
                self._free -= 1
                self._held[prompt] += 1
                self._waiting -= 1
            self._offer(prompt)
