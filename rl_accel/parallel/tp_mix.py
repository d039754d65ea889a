"""How much of the rollout each kind of round has been lately."""

from collections.abc import Mapping
from typing import Any

from rl_accel.parallel.tp_decisions import Observation
from rl_accel.parallel.tp_saved import kind_of, number

_FADE = 0.95


class RoundMix:
    """What the rollout's seconds and tokens went to lately, by round kind; a step fades to a third in 20 steps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.tokens: dict[str, float] = {}

    def observe(self, seen: Observation) -> None:
        """Take in a step."""
        for kind in self.seconds:
            self.seconds[kind] *= _FADE
            self.tokens[kind] *= _FADE
        self.seconds[seen.kind] = self.seconds.get(seen.kind, 0.0) + seen.rollout_seconds
        self.tokens[seen.kind] = self.tokens.get(seen.kind, 0.0) + seen.tokens

    def share(self, kind: str) -> float:
        """Return the share of the seconds, 0 to 1."""
        return self.seconds.get(kind, 0.0) / sum(self.seconds.values()) if self.seconds else 0.0

    def state_dict(self) -> dict[str, list[float]]:
        """Return everything, ready for JSON."""
        return {kind: [seconds, self.tokens[kind]] for kind, seconds in self.seconds.items()}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "RoundMix":
        """Return what ``state_dict`` saved.

        Raises:
            AttributeError, TypeError, ValueError: this is not what ``state_dict`` returns.
        """
        mix = cls()
        for kind, (seconds, tokens) in state.items():
            mix.seconds[kind_of(kind)], mix.tokens[kind_of(kind)] = number(seconds), number(tokens)
        return mix
