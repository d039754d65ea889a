"""When to change the tensor-parallel size (TP) of the rollout: RollPacker (NSDI'26, section 4), and a check that a change paid.

:class:`TpPlanner` decides, without clock or files; :class:`PlannedRun` shows it the steps of a run, also those of earlier launches.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Literal

from rl_accel.files import write_atomically
from rl_accel.parallel.model_memory import TpBounds
from rl_accel.rollout.driver import METRICS_PREFIX as TAIL_BATCHING

logger = logging.getLogger("rl_accel")

STATE_FILE = "rl_accel_tp_replan.json"
"""Beside the checkpoints: the steps that the planner has seen."""

RoundKind = Literal["short", "long", "all"]
"""short, long: rounds of tail batching. all: steps without rounds, and final rounds."""
Change = Literal["raise", "lower", "roll back"]

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


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One training step.

    Args:
        kind: of its round.
        tp: the size that it ran at, whatever was decided before.
        preemptions: sequences evicted from the key-value caches of all servers in this step; None: unknown, which is not 0.
        rollout_seconds: from the first launch until the batch was complete; above 0.
        tokens: generated in that time, those of aborted responses too; above 0.
    """

    kind: RoundKind
    tp: int
    preemptions: int | None
    rollout_seconds: float
    tokens: int


@dataclass(frozen=True)
class Decision:
    """A change of the size.

    Attributes:
        tp: the size for the next step.
        change: roll back: to the size before the last change.
        reason: why, and what to expect, in one line with the numbers.
    """

    tp: int
    change: Change
    reason: str


class TpPlanner:
    """Decisions about one size for all rounds of a run.

    TP doubles when preemptions rise (:func:`find_rise`) and halves after steps without any. Either is checked afterwards by rollout
    seconds per token (:func:`compare_speed`), which may roll it back; until then nothing else is changed. The page on TP replan of
    the documentation has the whole rule.

    The planner believes ``Observation.tp``: at a size that it did not ask for it starts anew.

    Args:
        bounds: the possible sizes.
        max_changes: changes carried out in a run, one of which is kept for rolling back; below 2 nothing ever changes.
    """

    def __init__(self, bounds: TpBounds, max_changes: int = 6) -> None:
        self.bounds = bounds
        self._max_changes = max_changes
        self._steps = self._tp = 0
        self.changes = 0  # carried out so far
        self._asked: tuple[int, Change] | None = None
        self._history: list[Observation] = []
        self._before: list[Observation] = []  # at the size before the last change, while that is being checked
        self._holds: dict[tuple[int, int], tuple[int, int]] = {}  # (from, to): until which step, and how often so far

    def step(self, seen: Observation) -> Decision | None:
        """Take in a step, and say what the next one should run at; None: the same size.

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
        return None if seen.preemptions is None else self._plan()

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
        self.changes += 1
        if asked[1] == "roll back":
            self._hold(tp, was)
        else:
            self._before = before[-CHECK_STEPS[1] :]

    def _plan(self) -> Decision | None:
        rise = find_rise(self._history)
        if rise is not None and rise.value > RAISE_ABOVE:
            reason = f"preemptions are {rise}, more than {RAISE_ABOVE:g}"
            return None if rise.is_noise else self._change(2 * self._tp, "raise", reason)
        calm = _calm_steps(self._history)
        counted = [step for step in self._history if step.preemptions is not None]
        if calm < CALM_STEPS or self._tp % 2 or any(steps[-1].preemptions for steps in _by_kind(counted).values()):
            return None
        return self._change(self._tp // 2, "lower", f"{calm} steps in a row without a preemption")

    def _change(self, target: int, change: Change, reason: str) -> Decision | None:
        if target not in self.bounds.sizes or self.changes + 2 > self._max_changes:
            return None
        return self._ask(target, change, reason, "unknown until tried; the published gain is 1 to 4% of a step")

    def _check(self) -> Decision | None:
        """Roll the last change back, or let it stand, or wait for more steps."""
        was, after = self._before[-1].tp, self._history[1:]  # the first step at a size is slow: cold caches and graphs
        fewest = min(sum(step.kind == kind for step in after) for kind in _by_kind(self._before))
        if fewest < CHECK_STEPS[0] and len(after) < CHECK_STEPS[1]:
            return None
        ratio = compare_speed(self._before, after)
        if ratio is not None and ratio.value > 1 + SLOWER and not ratio.is_noise:
            reason = f"TP {self._tp} is slower than TP {was}, rollout seconds per token are {ratio}"
            return self._ask(was, "roll back", reason, f"{1 - 1 / ratio.value:.1%} fewer rollout seconds per token")
        self._before = []
        if self._tp > was:
            self._hold(self._tp, was)
        return None

    def _ask(self, target: int, change: Change, reason: str, expected: str) -> Decision | None:
        until, _ = self._holds.get((self._tp, target), (0, 0))
        if self._steps < until:
            return None
        self._asked = target, change
        return Decision(target, change, f"{change} TP {self._tp} to {target}: {reason}; expected: {expected}")

    def _hold(self, source: int, target: int) -> None:
        _, times = self._holds.get((source, target), (0, 0))
        self._holds[source, target] = self._steps + RETRY_STEPS * 2 ** min(times, 20), times + 1


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


class PlannedRun:
    """Shows a planner the steps of a run.

    Args:
        bounds: the possible sizes.
        max_changes: of the planner.
        folder: of the checkpoints; None: nothing is kept.
    """

    def __init__(self, bounds: TpBounds, max_changes: int, folder: str | None) -> None:
        self._planner = TpPlanner(bounds, max_changes)
        self._file = Path(folder) / STATE_FILE if folder else None
        self._seen: list[dict[str, Any]] | None = None
        if bounds.note:
            logger.info("rl-accel: tp_replan: %s", bounds.note)

    def take_in(
        self,
        number: int,
        metrics: Mapping[str, Any],
        *,
        tp: int,
        preemptions: int | None,
        seconds: float,
        tokens: float,
    ) -> tuple[Decision | None, dict[str, float]]:
        """Take in a step, and keep it. At the first one, the planner is shown those before it that earlier launches have kept.

        Args:
            number: of the step or rollout.
            metrics: its other numbers; with tail batching they tell the kind of its round and all the tokens generated.
            tp: the size that it ran at.
            preemptions: of all servers; None: unknown.
            seconds, tokens: of its rollout; 0: unknown, and nothing is decided.

        Returns:
            The change of size that is wanted, if one is, and the numbers for the log by name.
        """
        if self._seen is None:
            self._seen = self._replay(number)
        tokens = float(metrics.get(TAIL_BATCHING + "tokens_generated") or tokens)
        change = None
        if seconds > 0 and tokens >= 1:
            seen = Observation(
                kind=_kind_of(metrics),
                tp=tp,
                preemptions=preemptions,
                rollout_seconds=float(seconds),
                tokens=round(tokens),
            )
            change = self._planner.step(seen)
            self._seen.append({"step": number, **asdict(seen)})
            self._save()
        wanted = tp if change is None else change.tp
        numbers = {"tp": float(tp), "wanted_tp": float(wanted), "changes": float(self._planner.changes)}
        return change, numbers if preemptions is None else {**numbers, "preemptions": float(preemptions)}

    def _replay(self, first: int) -> list[dict[str, Any]]:
        """Show the planner the kept steps before ``first`` whose size is still possible, and return them."""
        if self._file is None or not self._file.is_file():
            return []
        try:
            kept = json.loads(self._file.read_text())["steps"]
            steps = [
                (step, Observation(**{key: value for key, value in step.items() if key != "step"})) for step in kept
            ]
            earlier = [(step, seen) for step, seen in steps if step["step"] < first]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("rl-accel: tp_replan begins anew, %s cannot be used: %r", self._file, error)
            return []
        possible = [(step, seen) for step, seen in earlier if seen.tp in self._planner.bounds.sizes]
        for _, seen in possible:
            self._planner.step(seen)
        return [step for step, _ in possible]

    def _save(self) -> None:
        if self._file is None:
            return
        try:
            write_atomically(self._file, json.dumps({"steps": self._seen}))
        except OSError as error:
            logger.warning("rl-accel: tp_replan: %s could not be written: %s", self._file, error)


def _kind_of(metrics: Mapping[str, Any]) -> RoundKind:
    if metrics.get(TAIL_BATCHING + "short_round"):
        return "short"
    return "long" if metrics.get(TAIL_BATCHING + "long_round") else "all"
