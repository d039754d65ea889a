"""When to change the tensor-parallel size of the rollout (RollPacker, NSDI'26, section 4), with a check that it paid.

Pure: no clock, no processes. Report each step with :meth:`TpPlanner.step`; what it answers is for the caller to carry out.
"""

import math
from collections.abc import Mapping
from typing import Any

from rl_accel.parallel.tp_check import Rates
from rl_accel.parallel.tp_decisions import Decision, Observation
from rl_accel.parallel.tp_holds import Holds
from rl_accel.parallel.tp_mix import RoundMix
from rl_accel.parallel.tp_pressure import Pressure
from rl_accel.parallel.tp_rules import TpRules
from rl_accel.parallel.tp_saved import kind_of, number, truth, whole

_FORMAT = "rl_accel.tp_planner"
_VERSION = 1


class TpPlanner(TpRules):
    """Decisions about one size for all rounds of a run.

    **Raise.** TP doubles when preemptions are more than ``threshold`` times their reference: an exponential average of earlier
    steps of the same round kind at the present size. The kinds are averaged by their share of rollout seconds, and the rise must
    be more than chance (:class:`~rl_accel.parallel.tp_pressure.Pressure`).

    **Lower.** TP halves after ``calm_steps`` steps in a row without a preemption, unless the cache would be too full then.

    **Check.** After either, rollout seconds per token are compared with those before, kind by kind
    (:func:`~rl_accel.parallel.tp_check.compare`). If they rose, the change is rolled back, and not tried again for
    ``retry_steps``, twice as long each time. A raise that stands is not lowered again for as long. The first step at a new size
    is not counted: caches and graphs are cold. While a check or a cool-down lasts, nothing else is changed.

    **Unknown preemptions.** Nothing is raised or lowered. A check goes on, and may roll back: it needs no preemptions.

    **Advice not taken.** The planner believes ``Observation.tp``. If a change that it asked for is not carried out, it asks again
    after ``retry_steps``, doubled each time (for rolling back: after ``cooldown``). At a size that it did not ask for it starts
    anew.

    Args:
        bounds: the possible sizes, and the settings.
    """

    def step(self, seen: Observation) -> Decision:
        """Take in a step, and say what the next one should run at.

        Raises:
            ValueError: the step ran at a size outside the bounds.
        """
        if seen.tp not in self.bounds.sizes:
            raise ValueError(f"tp must be a possible size, found {seen.tp}: {self.bounds.why_not(seen.tp)}")
        self._steps += 1
        self._arrive(seen.tp)
        self._mix.observe(seen)
        self._pressure.observe(seen)
        if self._since > 0 or self._before is None:
            self._rates.observe(seen)
        self._since += 1
        if self._before is not None:
            return self._judge(*self._before)
        if self._steps <= self._quiet_until:
            number_of = self.settings.cooldown - (self._quiet_until - self._steps)
            cause = "a change that was not carried out" if self._refused else "a change"
            return self._keep(f"step {number_of} of {self.settings.cooldown} to cool down after {cause}")
        if seen.preemptions is None:
            return self._keep("preemptions are unknown, which is not none")
        return self._plan()

    def _arrive(self, tp: int) -> None:
        """Find out what became of the last decision."""
        (target, change), self._wanted = self._wanted or (0, "keep"), None
        was, self._tp = self._tp, tp
        if tp == was:
            if target:
                self._rest(refused=True)
            if target and change != "roll back":
                self._holds.add(tp, target, self._steps)
            return
        before = self._rates.lately()
        if was:
            self._measured[was] = self._rates.means()
            self._rest(refused=False)
        self._start_anew()
        if tp != target:
            return
        self._changes += 1
        if change == "roll back":
            self._holds.add(tp, was, self._steps)
        else:
            self._before = was, before

    def _rest(self, refused: bool) -> None:
        self._quiet_until, self._refused = self._steps + self.settings.cooldown - 1, refused

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs, ready for JSON: also right after a decision that is carried out by restarting."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "steps": self._steps,
            "changes": self._changes,
            "tp": self._tp,
            "wanted": list(self._wanted) if self._wanted else None,
            "quiet_until": self._quiet_until,
            "refused": self._refused,
            "mix": self._mix.state_dict(),
            "holds": self._holds.state_dict(),
            "measured": [[tp, dict(rates)] for tp, rates in self._measured.items()],
            "since": self._since,
            "before": [self._before[0], self._before[1].state_dict()] if self._before else None,
            "pressure": self._pressure.state_dict(),
            "rates": self._rates.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state. Settings and bounds may differ from the saved run's: a change is not rolled back to a size that
        is not possible any more.

        Raises:
            ValueError: the state is of another kind or version, or it is damaged; nothing has changed then.
        """
        found = (state.get("format"), state.get("version")) if isinstance(state, Mapping) else (None, None)
        if found != (_FORMAT, _VERSION):
            raise ValueError(f"state must be of {(_FORMAT, _VERSION)} (format, version), found {found}")
        resumed = TpPlanner(self.bounds)
        try:
            resumed._restore(state)
        except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            raise ValueError(f"state is damaged: {type(error).__name__}: {error}") from error
        self.__dict__.update(resumed.__dict__)

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._steps, self._changes, self._tp = whole(state["steps"]), whole(state["changes"]), whole(state["tp"])
        if state["wanted"] is not None:
            target, change = state["wanted"]
            if change not in ("raise", "lower", "roll back"):
                raise ValueError(f"wanted a change, found {change!r}")
            self._wanted = whole(target, 1), change
        self._quiet_until, self._refused = whole(state["quiet_until"]), truth(state["refused"])
        self._mix = RoundMix.restored(state["mix"])
        self._holds = Holds.restored(self.settings.retry_steps, state["holds"])
        for tp, rates in state["measured"]:
            self._measured[whole(tp, 1)] = {kind_of(kind): number(rate, -math.inf) for kind, rate in rates.items()}
        self._since = whole(state["since"])
        if state["before"] is not None:
            was, rates = state["before"]
            before = whole(was, 1), Rates.restored(self.settings, rates)
            self._before = before if was in self.bounds.sizes else None
        self._pressure = Pressure.restored(self.settings, state["pressure"])
        self._rates = Rates.restored(self.settings, state["rates"])
