"""Whether rollout became slower after a change: seconds per token before and after, of the same round kinds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rl_accel.parallel.noise import student_quantile
from rl_accel.parallel.tp_decisions import Observation
from rl_accel.parallel.tp_mix import RoundMix
from rl_accel.parallel.tp_saved import kind_of, number
from rl_accel.parallel.tp_settings import TpSettings

_SURE = 0.95


class Rates:
    """Logarithms of rollout seconds per token at one size, by round kind, the latest at the end."""

    def __init__(self, settings: TpSettings, by_kind: Mapping[str, list[float]] | None = None) -> None:
        self._settings = settings
        self.by_kind = {kind: list(rates) for kind, rates in (by_kind or {}).items()}

    def observe(self, seen: Observation) -> None:
        """Take in a step."""
        rates = self.by_kind.setdefault(seen.kind, [])
        rates.append(seen.log_rate)
        del rates[: -self._settings.check_limit]

    def lately(self) -> "Rates":
        """Return the few steps before now that a change is measured against."""
        few = max(self._settings.calm_steps, self._settings.check_steps)
        return Rates(self._settings, {kind: rates[-few:] for kind, rates in self.by_kind.items()})

    def means(self) -> dict[str, float]:
        """Return the mean of each round kind."""
        return {kind: fmean(rates) for kind, rates in self.by_kind.items()}

    def state_dict(self) -> dict[str, list[float]]:
        """Return the rates, ready for JSON."""
        return {kind: list(rates) for kind, rates in self.by_kind.items()}

    @classmethod
    def restored(cls, settings: TpSettings, state: Mapping[str, Any]) -> "Rates":
        """Return what ``state_dict`` saved.

        Raises:
            AttributeError, TypeError, ValueError: this is not what ``state_dict`` returns.
        """
        rates: dict[str, list[float]] = {
            kind_of(kind): [number(rate, -math.inf) for rate in rates] for kind, rates in state.items()
        }
        if not all(rates.values()):
            raise ValueError("a round kind has no steps")
        return cls(settings, rates)


@dataclass(frozen=True)
class Comparison:
    """Rollout seconds per token after a change over before.

    Attributes:
        ratio: of all round kinds together, by their share of rollout seconds; a kind that is wanting counts as unchanged.
        slower: whether it is slower by more than the margin, and by more than chance.
        doubtful: whether it is slower by more than the margin, which may be chance.
        complete: whether every kind that can be compared has steps enough.
        text: the numbers.
    """

    ratio: float
    slower: bool
    doubtful: bool
    complete: bool
    text: str


def compare(before: Rates, after: Rates, mix: RoundMix, settings: TpSettings, at_the_limit: bool) -> Comparison | None:
    """Compare each round kind with itself, so that a change of their order is no change of speed.

    The ratio r_k of a kind is that of the geometric means; all together is sum(w_k r_k), with w_k the share of seconds that the
    tokens of each kind, as they have come lately, took before. Chance is judged by a one-sided t-test at 95%, the scatter of the
    logarithms pooled over kinds and sides. A change is called slower early only if it is even when the kinds still wanting took
    no time at all.

    Args:
        at_the_limit: judge by the kinds that came, however few steps there are.

    Returns:
        ``None`` if no kind has steps enough on both sides.
    """
    both = list(before.by_kind)
    least = 1 if at_the_limit else settings.check_steps
    ready = [kind for kind in both if len(after.by_kind.get(kind, ())) >= least]
    if not ready:
        return None
    weights = shares(before.means(), mix)
    pairs = {kind: (before.by_kind[kind], after.by_kind[kind]) for kind in ready}
    ratios = {kind: math.exp(fmean(new) - fmean(old)) for kind, (old, new) in pairs.items()}
    freedom = sum(len(old) + len(new) - 2 for old, new in pairs.values())
    squares = sum((rate - fmean(side)) ** 2 for pair in pairs.values() for side in pair for rate in side)
    spread = sum((weights[k] * ratios[k]) ** 2 * (1 / len(old) + 1 / len(new)) for k, (old, new) in pairs.items())
    chance = student_quantile(_SURE, freedom) * math.sqrt(squares / freedom * spread) if freedom else math.inf
    measured = sum(weights[kind] * ratios[kind] for kind in ready)
    wanting = 1 - sum(weights[kind] for kind in ready)
    complete = len(ready) == len(both)
    judged = measured + (wanting if at_the_limit else 0.0)
    slower = judged > 1 + settings.slower and judged - 1 > chance
    each = ", ".join(f"{kind} {ratios[kind]:.3f}" for kind in ready)
    text = f"{measured + wanting:.3f} times the rollout seconds per token ({each}; chance ±{chance:.3f})"
    return Comparison(measured + wanting, slower, judged > 1 + settings.slower and not slower, complete, text)


def shares(log_rates: Mapping[str, float], mix: RoundMix) -> dict[str, float]:
    """Return the share of seconds that each kind takes at these rates; they add up to 1."""
    seconds = {kind: mix.tokens.get(kind, 0.0) * math.exp(rate) for kind, rate in log_rates.items()}
    total = sum(seconds.values()) or 1.0
    return {kind: each / total for kind, each in seconds.items()}
