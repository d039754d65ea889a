"""Simulated cluster whose requests are assigned to replicas by :class:`~rl_accel.rollout.balance.Balance`."""

from collections.abc import Iterable, Sequence
from itertools import repeat

from rl_accel.features import BalanceFlags
from rl_accel.rollout.balance import Balance, Instruction
from rl_accel.rollout.simulation import Cluster, EngineModel, SimulatedRequest

TICK = 4.0
"""Simulated seconds between calls of ``Balance.tick``, which moves requests. A real run has more calls, which would save
no more time in the simulation."""


class BalancedCluster(Cluster):
    """Simulated replicas that share one queue. ``core`` (default: a new one) assigns requests to replicas and migrates them."""

    def __init__(self, engine: EngineModel, replicas: int, prompt_tokens: int = 0, core: Balance | None = None) -> None:
        super().__init__(engine, replicas, prompt_tokens)
        self._prompt_tokens, self._tick = prompt_tokens, TICK
        self._core = Balance(engine.slots, BalanceFlags()) if core is None else core  # an idle Balance is falsy
        self._wanted: dict[int, tuple[int, float]] = {}  # by request id: length, tokens before last launch
        for number in range(replicas):
            self._core.add_replica(str(number), 0.0, engine.cache_tokens)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._wanted

    def __len__(self) -> int:
        return len(self._wanted)

    def launch(
        self,
        ids: Sequence[int],
        lengths: Sequence[int],
        tokens: Sequence[float] | None = None,
        prompts: Sequence[int] | None = None,
        replicas: Iterable[int] | None = None,
    ) -> None:
        """Launches requests. Ignores ``replicas``, because :class:`Balance` chooses the replica of each request."""
        self._tick = max(self._tick, self.now)
        had = tokens or repeat(0.0, len(ids))
        for request_id, length, begun, prompt in zip(ids, lengths, had, prompts or ids, strict=True):
            self._wanted[request_id] = length, begun
            self._carry_out(self._core.request(str(request_id), self.now, str(prompt), self._prompt_tokens))

    def cancel(self, ids: Iterable[int]) -> list[int]:
        """Stops running or waiting requests. Returns the number of tokens that each request has generated."""
        tokens: list[int] = []
        instructions: list[Instruction] = []
        for request_id in ids:
            _, had = self._wanted.pop(request_id)
            tokens += super().cancel([request_id]) if super().__contains__(request_id) else [round(had)]
            instructions += self._core.over(str(request_id), self.now)
        self._carry_out(instructions)
        return tokens

    def next_event(self) -> float:
        """Returns the simulated time of the next event in seconds; infinity if there is none."""
        return min(super().next_event(), self._tick) if self._wanted else super().next_event()

    def happen(self) -> SimulatedRequest | None:
        """Advances the simulation to the next event. Returns the request that ended at this event, or None."""
        if self._tick < super().next_event():
            self.now = self._tick
            self._tick += TICK
            self._carry_out(self._core.tick(self.now))
            return None
        ended = super().happen()
        if ended is not None:
            _, had = self._wanted.pop(ended.id)
            self._carry_out(self._core.over(str(ended.id), self.now, ended.length - round(had)))
        return ended

    def _carry_out(self, instructions: Iterable[Instruction]) -> None:
        for ticket, replica, stop in instructions:
            request_id = int(ticket)
            if request_id not in self._wanted:  # cancelled meanwhile
                continue
            length, had = self._wanted[request_id]
            if stop:
                tokens = min(super().cancel([request_id])[0], length - 1)
                self._wanted[request_id] = length, tokens
                self._carry_out(self._core.again(ticket, self.now, tokens - round(had)) or ())
            else:
                super().launch([request_id], [length], [had], replicas=[int(replica)])
