"""When to change the tensor-parallel size (TP) of the rollout: RollPacker (NSDI'26, section 4), and a check that a change paid.

Pure: no clock, no processes, no files. Report each step with :meth:`TpPlanner.step`; carrying out the answer is up to the caller.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Any, Literal, get_args

from rl_accel.parallel.model_memory import TpBounds

RoundKind = Literal["short", "long", "all"]
"""short, long: rounds of tail batching. all: steps without rounds, and final rounds."""
Change = Literal["keep", "raise", "lower", "roll back"]

RAISE_ABOVE = 1.05
"""Preemptions over their reference beyond which TP doubles (published)."""
CALM_STEPS = 4
"""Steps in a row without a preemption after which TP halves (published)."""
REFERENCE_STEPS = (6, 15)
"""Steps of a round kind that its reference is the mean of: fewer say too little, more do not follow the run."""
CONFIRM_STEPS = 2
"""Latest steps, the least of which is held against the reference: one high step alone is no rise."""
FEW_PREEMPTIONS = 10
"""Fewer in a step than this count as this: no other size would relieve a rise from 1 to 5."""
NOISE = 3.25
"""Standard deviations that a rise must exceed: with preemptions that scatter by 20%, one false rise in about 2,000 steps."""
CHECK_STEPS = (5, 20)
"""Steps of each round kind at a new size before it is judged; steps after which it is judged by the kinds that came."""
SLOWER = 0.03
"""Rise of rollout seconds per token beyond which a change is rolled back: as much as it can gain (published: 1 to 4%)."""
SURE = 2.0
"""Standard errors that this rise must exceed."""
RETRY_STEPS = 25
"""Steps until the same change is tried again; doubles each time, so that a run does not go to and fro."""
WINDOW = 80
"""Steps that are remembered: sixteen long rounds where every fifth round is long."""

_VERSION = 2


@dataclass(frozen=True)
class Observation:
    """One training step.

    Args:
        kind: of its round.
        tp: the size that it ran at, whatever was decided before.
        preemptions: sequences evicted from the key-value caches of all servers in this step; None: unknown, which is not 0.
        rollout_seconds: from the first launch until the batch was complete.
        tokens: generated in that time, those of aborted responses too.

    Raises:
        ValueError: an argument is out of range. Some engines report -1 preemptions for unknown: that is an error.
    """

    kind: RoundKind
    _: KW_ONLY
    tp: int
    preemptions: int | None
    rollout_seconds: float
    tokens: int

    def __post_init__(self) -> None:
        is_counted = self.preemptions is None or self.preemptions >= 0
        if not (
            self.kind in get_args(RoundKind) and is_counted and 0 < self.rollout_seconds < math.inf and self.tokens > 0
        ):
            wanted = f"kind {' or '.join(get_args(RoundKind))}, preemptions of at least 0 or None, seconds and tokens above 0"
            raise ValueError(f"a step wants {wanted}, found {self}")


@dataclass(frozen=True)
class Decision:
    """What the next step should run at.

    Attributes:
        tp: the size for the next step.
        change: what that is to the size of the step just seen. roll back: to the size before the last change.
        reason: why, in one line, with the numbers.
        expected: the effect of the change, in words.
    """

    tp: int
    change: Change
    reason: str
    expected: str = "nothing changes"

    def __str__(self) -> str:
        return f"{self.reason}; expected: {self.expected}"


class TpPlanner:
    """Decisions about one size for all rounds of a run.

    **Raise.** TP doubles when preemptions are more than :data:`RAISE_ABOVE` times their reference and the rise is more than noise
    (:func:`find_rise`).

    **Lower.** TP halves after :data:`CALM_STEPS` steps in a row without a preemption, unless the latest round of another kind had
    some.

    **Check.** After either, rollout seconds per token are compared with those before (:func:`compare_speed`). If they rose, the
    change is rolled back. While a check lasts, nothing else is changed.

    **Hold.** A change that was rolled back, or asked for and not carried out, is not asked for again for :data:`RETRY_STEPS`, twice
    as long each time. A raise that stands is not lowered again for as long.

    **Unknown preemptions.** Nothing is raised or lowered. A check goes on, and may roll back: it needs no preemptions.

    The planner believes ``Observation.tp``: at a size that it did not ask for it starts anew.

    Args:
        bounds: the possible sizes.
        max_changes: changes carried out in a run, one of which is kept for rolling back; below 2 nothing ever changes.
    """

    def __init__(self, bounds: TpBounds, max_changes: int = 6) -> None:
        self.bounds = bounds
        self._max_changes = max_changes
        self._steps = self._changes = self._tp = 0
        self._asked: tuple[int, Change] | None = None
        self._history: list[Observation] = []
        self._before: list[Observation] = []  # at the size before the last change, while that is being checked
        self._holds: dict[tuple[int, int], tuple[int, int]] = {}  # (from, to): until which step, and how often so far

    @property
    def changes(self) -> int:
        """Changes carried out so far."""
        return self._changes

    def step(self, seen: Observation) -> Decision:
        """Take in a step, and say what the next one should run at.

        Raises:
            ValueError: the step ran at an impossible size.
        """
        if seen.tp not in self.bounds.sizes:
            raise ValueError(f"tp must be a possible size, found {seen.tp}: {self.bounds.why_not(seen.tp)}")
        self._steps += 1
        self._settle(seen.tp)
        self._history = [*self._history, seen][-WINDOW:]
        if self._before:
            return self._check()
        if seen.preemptions is None:
            return self._keep("preemptions are unknown, which is not none")
        return self._plan()

    def _settle(self, tp: int) -> None:
        """Find out what became of the change asked for last."""
        asked, self._asked = self._asked, None
        if tp == self._tp:
            if asked is not None:
                self._hold(tp, asked[0])
            return
        was, before = self._tp, self._history
        self._tp, self._history, self._before = tp, [], []
        if asked is None or asked[0] != tp:
            return
        self._changes += 1
        if asked[1] == "roll back":
            self._hold(tp, was)
        else:
            self._before = before[-CHECK_STEPS[1] :]

    def _plan(self) -> Decision:
        steps_by_kind = _by_kind([step for step in self._history if step.preemptions is not None])
        rise = find_rise(self._history)
        if rise is not None and rise.value > RAISE_ABOVE:
            reason = f"preemptions are {rise}"
            if rise.is_noise:
                return self._keep(f"{reason}, which may be noise")
            return self._change(2 * self._tp, "raise", f"{reason}, more than {RAISE_ABOVE:g}")
        calm = _calm_steps(self._history)
        if calm >= CALM_STEPS and not any(steps[-1].preemptions for steps in steps_by_kind.values()):
            reason = f"{calm} steps in a row without a preemption"
            if self._tp % 2:
                return self._keep(f"{reason}, but TP {self._tp} cannot be halved")
            return self._change(self._tp // 2, "lower", reason)
        if rise is None:
            have = ", ".join(f"{len(steps)} {kind}" for kind, steps in steps_by_kind.items())
            return self._keep(
                f"no reference yet, it takes {REFERENCE_STEPS[0] + CONFIRM_STEPS} steps of a kind, have {have}"
            )
        return self._keep(f"preemptions are {rise}, not more than {RAISE_ABOVE:g}")

    def _change(self, target: int, change: Change, reason: str) -> Decision:
        if target not in self.bounds.sizes:
            return self._keep(f"{reason}, but TP {target} is not possible: {self.bounds.why_not(target)}")
        if self._changes + 2 > self._max_changes:
            made = f"{self._changes} of at most {self._max_changes} changes are made"
            return self._keep(f"{reason}, but {made}, and one is kept for rolling back")
        return self._ask(target, change, reason, "unknown until tried; the published gain is 1 to 4% of a step")

    def _check(self) -> Decision:
        """Roll the last change back, or let it stand, or wait for more steps."""
        was, after = self._before[-1].tp, self._history[1:]  # the first step at a size is slow: cold caches and graphs
        have = {kind: sum(step.kind == kind for step in after) for kind in _by_kind(self._before)}
        if min(have.values()) < CHECK_STEPS[0] and len(after) < CHECK_STEPS[1]:
            words = ", ".join(f"{count} {kind}" for kind, count in have.items())
            return self._keep(f"comparing with TP {was} over {CHECK_STEPS[0]} steps of each round kind, have {words}")
        ratio = compare_speed(self._before, after)
        if ratio is not None and ratio.value > 1 + SLOWER and not ratio.is_noise:
            reason = f"TP {self._tp} is slower than TP {was}, rollout seconds per token are {ratio}"
            return self._ask(was, "roll back", reason, f"{1 - 1 / ratio.value:.1%} fewer rollout seconds per token")
        self._before = []
        if self._tp > was:
            self._hold(self._tp, was)
        if ratio is None:
            return self._keep(f"TP {was} and {self._tp} cannot be compared, no round kind was seen at both")
        return self._keep(f"the change from TP {was} stands, rollout seconds per token are {ratio}")

    def _ask(self, target: int, change: Change, reason: str, expected: str) -> Decision:
        until, _ = self._holds.get((self._tp, target), (0, 0))
        if self._steps < until:
            return self._keep(
                f"{reason}, but TP {self._tp} to {target} is not tried again for {until - self._steps} steps"
            )
        self._asked = target, change
        return Decision(target, change, f"{change} TP {self._tp} to {target}: {reason}", expected)

    def _keep(self, reason: str) -> Decision:
        return Decision(self._tp, "keep", f"keep TP {self._tp}: {reason}")

    def _hold(self, source: int, target: int) -> None:
        _, times = self._holds.get((source, target), (0, 0))
        self._holds[source, target] = self._steps + RETRY_STEPS * 2 ** min(times, 20), times + 1

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, ready for JSON, also right after a decision that is carried out by restarting."""
        return {
            "version": _VERSION,
            "steps": self._steps,
            "changes": self._changes,
            "tp": self._tp,
            "asked": list(self._asked) if self._asked else None,
            "history": [asdict(step) for step in self._history],
            "before": [asdict(step) for step in self._before],
            "holds": [[*sizes, *hold] for sizes, hold in self._holds.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state. The bounds may be others: a change is not rolled back to a size that has become impossible.

        Raises:
            ValueError: the state is of another version, or damaged; nothing has changed then.
        """
        if not isinstance(state, Mapping) or state.get("version") != _VERSION:
            raise ValueError(f"state of the TP planner must be of version {_VERSION}")
        resumed = TpPlanner(self.bounds, self._max_changes)
        try:
            resumed._restore(state)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"state of the TP planner is damaged: {type(error).__name__}: {error}") from error
        self.__dict__.update(resumed.__dict__)

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._steps, self._changes, self._tp = (int(state[key]) for key in ("steps", "changes", "tp"))
        if state["asked"] is not None:
            target, change = state["asked"]
            self._asked = int(target), change
        self._history, before = ([Observation(**step) for step in state[key]] for key in ("history", "before"))
        self._before = before if before and before[-1].tp in self.bounds.sizes else []
        for source, target, until, times in state["holds"]:
            self._holds[int(source), int(target)] = int(until), int(times)


@dataclass(frozen=True)
class Ratio:
    """A number over what it was before, all round kinds together.

    Attributes:
        value: 1 is as before.
        noise: how far from 1 noise alone may take it.
        text: the numbers of each kind.
    """

    value: float
    noise: float
    text: str

    @property
    def is_noise(self) -> bool:
        """Whether noise alone may have taken it so far above 1."""
        return self.value - 1 <= self.noise

    def __str__(self) -> str:
        return f"{self.value:.3f} times what they were ({self.text}, noise ±{self.noise:.3f})"


def find_rise(history: Sequence[Observation]) -> Ratio | None:
    """Compare preemptions of the latest steps of each round kind with earlier ones at the same size.

    One size serves all rounds: the rise is the mean of the kinds' rises, weighted with their share of rollout seconds; a kind
    without a reference counts as unchanged. Noise is that of the differences between successive steps, so that a steady rise is not
    taken for it, and at least that of independent events (Poisson).

    Returns:
        None while no kind has enough steps.
    """
    rise, variance, words = 0.0, 0.0, []
    for kind, steps in _by_kind(history).items():
        counts = [step.preemptions for step in steps if step.preemptions is not None]
        reference, latest = counts[:-CONFIRM_STEPS][-REFERENCE_STEPS[1] :], counts[-CONFIRM_STEPS:]
        if len(reference) < REFERENCE_STEPS[0]:
            continue
        mean = fmean(reference)
        base = max(mean, FEW_PREEMPTIONS)
        scatter = fmean((b - a) ** 2 / 2 for a, b in pairwise(reference))
        share = sum(step.rollout_seconds for step in steps) / sum(step.rollout_seconds for step in history)
        rise += share * (max(min(latest), FEW_PREEMPTIONS) / base - 1)
        variance += (share / base) ** 2 * max(scatter, mean, 1.0) * (1 + 1 / len(reference))
        words.append(f"{kind} {min(latest)} over {mean:.4g}")
    return Ratio(1 + rise, NOISE * math.sqrt(variance), ", ".join(words)) if words else None


def compare_speed(before: Sequence[Observation], after: Sequence[Observation]) -> Ratio | None:
    """Compare the seconds that rollouts took after a change with those that their tokens would have taken before it.

    Each round kind is held against itself, so that another order of kinds is no change of speed. Noise is told from the scatter of
    the steps before.

    Returns:
        None if no round kind is on both sides.
    """
    seconds_per_token = {
        kind: sum(step.rollout_seconds for step in steps) / sum(step.tokens for step in steps)
        for kind, steps in _by_kind(before).items()
    }
    ratios = [step.rollout_seconds / step.tokens / seconds_per_token[step.kind] for step in before]
    compared = [step for step in after if step.kind in seconds_per_token]
    if not compared:
        return None
    expected = sum(step.tokens * seconds_per_token[step.kind] for step in compared)
    noise = SURE * pstdev(ratios) * math.sqrt(1 / len(before) + 1 / len(compared))
    return Ratio(sum(step.rollout_seconds for step in compared) / expected, noise, f"{len(compared)} steps")


def _by_kind(history: Sequence[Observation]) -> dict[str, list[Observation]]:
    steps: dict[str, list[Observation]] = {}
    for step in history:
        steps.setdefault(step.kind, []).append(step)
    return steps


def _calm_steps(history: Sequence[Observation]) -> int:
    """How many steps there are since the last one with preemptions, or with an unknown number."""
    return next((i for i, step in enumerate(reversed(history)) if step.preemptions != 0), len(history))
