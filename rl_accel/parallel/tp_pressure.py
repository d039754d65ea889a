"""Memory pressure: preemptions against what was usual for the same kind of round at the same size."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_accel.parallel.noise import student_quantile
from rl_accel.parallel.tp_decisions import Observation
from rl_accel.parallel.tp_mix import RoundMix
from rl_accel.parallel.tp_saved import kind_of, number, whole
from rl_accel.parallel.tp_settings import TpSettings

_ACCIDENT = 0.0001
_LEAST_STEPS = 3
_PART = 0.05


@dataclass
class Reference:
    """Preemptions of one round kind: the latest few steps, and an exponential average of those before.

    The average is the plain one until it has seen as many steps as it remembers. Scatter is told from the differences between
    successive steps (von Neumann's estimator), so that a steady rise is not taken for noise.
    """

    steps: int = 0
    mean: float = 0.0
    variance: float = 0.0
    last: int = 0
    recent: list[int] = field(default_factory=list)

    def observe(self, preemptions: int, settings: TpSettings) -> None:
        """Take in a step; the oldest of the recent ones moves into the average."""
        self.recent.append(preemptions)
        while len(self.recent) > settings.confirm_steps:
            oldest = self.recent.pop(0)
            if self.steps:
                weight = max(1 / self.steps, 1 / settings.reference_steps)
                self.variance += weight * ((oldest - self.last) ** 2 / 2 - self.variance)
            self.steps += 1
            self.mean += max(1 / self.steps, 1 / settings.reference_steps) * (oldest - self.mean)
            self.last = oldest

    @property
    def now(self) -> int:
        """The least of the recent steps: one step that is high alone is no rise."""
        return min(self.recent)

    def rise(self, settings: TpSettings) -> tuple[float, float] | None:
        """Return by which share of the reference the recent steps are above it, and how much of that may be chance.

        Chance is what the least of so many steps stays below in 9,999 of 10,000 cases, with the scatter seen so far, and at least
        that of independent events. ``None`` while too few steps are in the average.
        """
        if self.steps < _LEAST_STEPS:
            return None
        base = max(self.mean, settings.least_reference)
        known = max(2, min(self.steps, 2 * settings.reference_steps - 1))
        sure = 1 - _ACCIDENT ** (1 / len(self.recent))
        scatter = student_quantile(sure, known - 1) * math.sqrt(self.variance)
        counting = student_quantile(sure, 1000) * math.sqrt(max(self.mean, 1.0))
        chance = max(scatter, counting) * math.sqrt(1 + 1 / known)
        return max(self.now, settings.least_reference) / base - 1, chance / base


@dataclass(frozen=True)
class Rise:
    """Preemptions over their reference, all round kinds together.

    Attributes:
        ratio: 1 is usual.
        chance: how far above 1 it may be by chance.
        text: the numbers of each kind.
    """

    ratio: float
    chance: float
    text: str


class Pressure:
    """Preemptions at one size, by round kind.

    One size serves all rounds, so the kinds are combined: the rise is the mean of their rises, weighted with the share of rollout
    seconds each has taken lately; a kind without a reference counts as usual. Calm is a row of steps of any kind without a
    preemption, if the latest step of every kind was without one too.
    """

    def __init__(self, settings: TpSettings) -> None:
        self.settings = settings
        self._references: dict[str, Reference] = {}
        self._calm = 0
        self._fullest: float | None = None

    def observe(self, seen: Observation) -> None:
        """Take in a step. An unknown count teaches nothing, and ends a calm row."""
        if seen.preemptions is not None:
            self._references.setdefault(seen.kind, Reference()).observe(seen.preemptions, self.settings)
        if seen.preemptions != 0:
            self._calm, self._fullest = 0, None
            return
        self._calm += 1
        if seen.kv_use is not None:
            self._fullest = seen.kv_use if self._fullest is None else max(self._fullest, seen.kv_use)

    def rise(self, mix: RoundMix) -> Rise | None:
        """Return the rise of all kinds together; ``None`` while none has a reference."""
        rises = {kind: rise for kind, known in self._references.items() if (rise := known.rise(self.settings))}
        if not rises:
            return None
        total = sum(mix.share(kind) * by for kind, (by, _) in rises.items())
        chance = math.sqrt(sum((mix.share(kind) * chance) ** 2 for kind, (_, chance) in rises.items()))
        text = ", ".join(
            f"{kind} {self._references[kind].now:.4g} over {self._references[kind].mean:.4g}" for kind in rises
        )
        return Rise(1 + total, chance, text)

    def is_calm(self, mix: RoundMix) -> bool:
        """Whether no round kind needs the memory it has."""
        latest = [known.recent[-1] for kind, known in self._references.items() if mix.share(kind) >= _PART]
        return self._calm >= self.settings.calm_steps and not any(latest)

    @property
    def calm(self) -> int:
        """Steps in a row without a preemption."""
        return self._calm

    @property
    def fullest(self) -> float | None:
        """The largest known share of a cache in use in the calm row."""
        return self._fullest

    @property
    def missing(self) -> str:
        """What is wanting for a first reference."""
        wanted = _LEAST_STEPS + self.settings.confirm_steps
        steps = {kind: known.steps + len(known.recent) for kind, known in self._references.items()}
        have = ", ".join(f"{count} {kind}" for kind, count in steps.items()) or "none"
        return f"it takes {wanted} steps of a round kind at this size with known preemptions, and there are {have}"

    def state_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        references = {
            kind: [known.steps, known.mean, known.variance, known.last, list(known.recent)]
            for kind, known in self._references.items()
        }
        return {"references": references, "calm": self._calm, "fullest": self._fullest}

    @classmethod
    def restored(cls, settings: TpSettings, state: Mapping[str, Any]) -> "Pressure":
        """Return what ``state_dict`` saved.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: this is not what ``state_dict`` returns.
        """
        pressure = cls(settings)
        for kind, (steps, mean, variance, last, recent) in state["references"].items():
            counts = [whole(count) for count in recent]
            if not counts:
                raise ValueError(f"round kind {kind!r} has no steps")
            reference = Reference(whole(steps), number(mean), number(variance), whole(last), counts)
            pressure._references[kind_of(kind)] = reference
        pressure._calm = whole(state["calm"])
        pressure._fullest = None if state["fullest"] is None else number(state["fullest"])
        return pressure
