"""The rules by which the tensor-parallel size changes. Steps come in by ``TpPlanner``."""

import math

from rl_accel.parallel.tp_bounds import TpBounds
from rl_accel.parallel.tp_check import Comparison, Rates, compare, shares
from rl_accel.parallel.tp_decisions import Change, Decision
from rl_accel.parallel.tp_holds import Holds
from rl_accel.parallel.tp_mix import RoundMix
from rl_accel.parallel.tp_pressure import Pressure


class TpRules:
    """What is known of the present size and of others, and what follows."""

    def __init__(self, bounds: TpBounds) -> None:
        self.bounds, self.settings = bounds, bounds.settings
        self._steps = self._changes = 0
        self._tp = 0
        self._wanted: tuple[int, Change] | None = None
        self._quiet_until = 0
        self._refused = False
        self._mix = RoundMix()
        self._holds = Holds(self.settings.retry_steps)
        self._measured: dict[int, dict[str, float]] = {}
        self._start_anew()

    def _start_anew(self) -> None:
        """Forget what holds at one size only, and any check."""
        self._pressure, self._rates = Pressure(self.settings), Rates(self.settings)
        self._since = 0
        self._before: tuple[int, Rates] | None = None

    def _judge(self, was: int, before: Rates) -> Decision:
        """Roll the last change back, or let it stand, or wait for more steps."""
        late = self._since >= self.settings.check_limit
        found = compare(before, self._rates, self._mix, self.settings, late)
        if found is not None and found.slower:
            reason = f"TP {self._tp} is slower than TP {was}, {found.text}"
            if self._refused and self._steps <= self._quiet_until:
                return self._keep(f"{reason}, but rolling back was not carried out")
            expected = f"{_percent(1 / found.ratio)} rollout seconds per token"
            return self._want(was, "roll back", reason, expected, 1 / found.ratio)
        if not late and (found is None or not found.complete or found.doubtful):
            return self._keep(self._waiting(was, before, found))
        self._before = None
        if self._tp > was:
            self._holds.add(self._tp, was, self._steps)
        if found is None:
            return self._keep(f"TP {was} and {self._tp} cannot be compared, no round kind was seen at both")
        verdict = (
            "it is no slower" if found.ratio <= 1 else f"it is not shown to be slower by {self.settings.slower:.0%}"
        )
        return self._keep(f"the change from TP {was} stands, {verdict}: {found.text}")

    def _waiting(self, was: int, before: Rates, found: Comparison | None) -> str:
        have = ", ".join(f"{len(self._rates.by_kind.get(kind, ()))} {kind}" for kind in before.by_kind)
        so_far = f", so far {found.text}" if found else ""
        return f"comparing with TP {was} over {self.settings.check_steps} steps of each round kind or more, have {have}{so_far}"

    def _plan(self) -> Decision:
        """The published rule, and what keeps it from acting on chance."""
        rise = self._pressure.rise(self._mix)
        if rise is not None and rise.ratio > self.settings.threshold:
            reason = f"preemptions are {rise.ratio:.2f} times their reference ({rise.text})"
            if rise.ratio - 1 <= rise.chance:
                return self._keep(f"{reason}, which may be chance up to {1 + rise.chance:.2f}")
            return self._change(2 * self._tp, "raise", f"{reason}, more than {self.settings.threshold:g}")
        if self._pressure.is_calm(self._mix):
            return self._lower(f"{self._pressure.calm} steps in a row without a preemption")
        if rise is None:
            return self._keep(f"no reference yet, {self._pressure.missing}")
        usual = f"preemptions are {rise.ratio:.2f} times their reference ({rise.text})"
        return self._keep(f"{usual}, not more than {self.settings.threshold:g}")

    def _lower(self, reason: str) -> Decision:
        half = self._tp // 2
        if self._tp % 2:
            return self._keep(f"{reason}, but TP {self._tp} cannot be halved")
        fullest = self._pressure.fullest
        if fullest is not None and half in self.bounds.sizes:
            now, then = self.bounds.cache_tokens(self._tp), self.bounds.cache_tokens(half)
            known = now is not None and then is not None
            full = fullest * (now / then if then else math.inf) if now is not None and then is not None else fullest
            if full > self.settings.kv_limit:
                would = f"at TP {half} the cache would be {'' if known else 'at least '}{full:.0%} full"
                return self._keep(f"{reason}, but {would}, more than {self.settings.kv_limit:.0%}")
        return self._change(half, "lower", reason)

    def _change(self, target: int, change: Change, reason: str) -> Decision:
        if target not in self.bounds.sizes:
            return self._keep(f"{reason}, but TP {target} is not possible: {self.bounds.why_not(target)}")
        if self._changes + 2 > self.settings.max_changes:
            made = f"{self._changes} of at most {self.settings.max_changes} changes are made"
            return self._keep(f"{reason}, but {made}, and one is kept for rolling back")
        left = self._holds.left(self._tp, target, self._steps)
        if left:
            return self._keep(f"{reason}, but TP {self._tp} to {target} is not tried again for {left} steps")
        unknown = f" ({self.bounds.note})" if change == "lower" and self.bounds.note else ""
        return self._want(target, change, reason + unknown, *self._expect(target))

    def _expect(self, target: int) -> tuple[str, float | None]:
        """The effect of a change as far as it is known."""
        words = []
        now = self._rates.means()
        then = {kind: rate for kind, rate in self._measured.get(target, {}).items() if kind in now}
        ratio = None
        if then:
            weights = shares({kind: now[kind] for kind in then}, self._mix)
            ratio = sum(weights[kind] * math.exp(then[kind] - now[kind]) for kind in then)
            words.append(f"{_percent(ratio)} rollout seconds per token, as last measured at TP {target}")
        room, more = self.bounds.cache_tokens(self._tp), self.bounds.cache_tokens(target)
        if room and more:
            words.append(f"room for {more / room:.2f} times as many tokens in the caches of all servers")
        return "; ".join(words) or "unknown until tried; the published gain is 1 to 4% of a step", ratio

    def _want(self, tp: int, change: Change, reason: str, expected: str, ratio: float | None) -> Decision:
        self._wanted = tp, change
        return Decision(tp, change, f"{change} TP {self._tp} to {tp}: {reason}", expected, ratio)

    def _keep(self, reason: str) -> Decision:
        return Decision(self._tp, "keep", f"keep TP {self._tp}: {reason}")


def _percent(ratio: float) -> str:
    return f"{abs(1 - ratio):.1%} {'fewer' if ratio <= 1 else 'more'}"
