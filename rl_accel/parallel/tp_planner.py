"""Changes of the rollout's tensor-parallel size (TP): RollPacker (NSDI'26, section 4), and a check that each change paid off.

:class:`TpPlanner` decides, without clock or files. :class:`PlannedRun` passes the steps of this and earlier launches to the
planner.
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
"""Name of the file, next to the checkpoints, that holds the steps seen by the planner."""

RoundKind = Literal["short", "long", "all"]
"""short, long: rounds of tail batching. all: steps without rounds, and final rounds."""
Change = Literal["raise", "lower", "roll back"]

RAISE_ABOVE = 1.05
"""Ratio of preemptions to their reference above which TP doubles (published)."""
CALM_STEPS = 4
"""Number of steps in a row without a preemption after which TP halves (published)."""
REFERENCE_STEPS = (6, 15)
"""Minimum and maximum number of steps averaged for a kind's reference: fewer are too noisy, more do not follow the run."""
CONFIRM_STEPS = 2
"""Number of latest steps whose minimum is compared with the reference: one high step alone is no rise."""
FEW_PREEMPTIONS = 10
"""Preemptions per step below this number count as this number: no other size would relieve a rise from 1 to 5."""
NOISE = 3.25
"""Standard deviations that a rise must exceed; about one false rise in 2,000 steps if preemptions scatter by 20%."""
CHECK_STEPS = (5, 20)
"""Steps of each round kind before a new size is judged; steps after which the round kinds so far are enough."""
SLOWER = 0.03
"""Rise of rollout seconds per token above which a change is rolled back: as much as a change can gain (published: 1 to 4%)."""
SURE = 2.0
"""Standard errors that the rise of rollout seconds per token must exceed."""
RETRY_STEPS = 25
"""Steps until the same change is tried again; doubles each time, so that a run does not oscillate."""
WINDOW = 80
"""Number of steps remembered: sixteen long rounds if every fifth round is long."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One training step.

    Args:
        kind: kind of the step's round.
        tp: size at which the step ran, whatever was decided before.
        preemptions: number of sequences evicted from the key-value caches of all servers; None: unknown, which differs from 0.
        rollout_seconds: seconds from the first launch until the batch was complete; above 0.
        tokens: number of tokens generated in this time, including those of aborted responses; above 0.
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
        tp: size for the next step.
        change: kind of the change; "roll back" returns to the size before the last change.
        reason: reason and expected effect, in one line with the numbers.
    """

    tp: int
    change: Change
    reason: str


class TpPlanner:
    """Decides about one size for all rounds of a run.

    TP doubles when preemptions rise (:func:`find_rise`) and halves after steps without preemptions. Each change is then checked by
    rollout seconds per token (:func:`compare_speed`) and may be rolled back; until then, nothing else is changed. The page on TP
    replan of the documentation has the whole rule.

    The planner relies on ``Observation.tp``. At a size that the planner did not request, it starts anew.

    Args:
        bounds: the possible sizes.
        max_changes: maximum number of changes in a run, one of them reserved for a rollback; below 2, nothing ever changes.
    """

    def __init__(self, bounds: TpBounds, max_changes: int = 6) -> None:
        self.bounds = bounds
        self._max_changes = max_changes
        self._steps = self._tp = 0
        self.changes = 0  # number carried out so far
        self._asked: tuple[int, Change] | None = None
        self._history: list[Observation] = []
        self._before: list[Observation] = []  # steps before the last change, while that change is checked
        self._holds: dict[tuple[int, int], tuple[int, int]] = {}  # (from, to): blocked until step, times blocked

    def step(self, seen: Observation) -> Decision | None:
        """Takes in a step; returns the change of size for the next step, or None to keep the size.

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
        """Determines whether the last requested change was carried out."""
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
        """Decides whether to roll the last change back, to keep the change, or to wait for more steps."""
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
    """Ratio of a new value to the value before, over all round kinds.

    Attributes:
        value: the ratio; 1: unchanged.
        noise: deviation from 1 that noise alone may cause.
        text: numbers behind the ratio.
    """

    value: float
    noise: float
    text: str

    @property
    def is_noise(self) -> bool:
        """True if noise alone may explain a ratio this far above 1."""
        return self.value - 1 <= self.noise

    def __str__(self) -> str:
        return f"{self.value:.3f} times what they were ({self.text}, noise ±{self.noise:.3f})"


def find_rise(history: Sequence[Observation]) -> Ratio | None:
    """Compares preemptions of the latest steps of each round kind with those of earlier steps at the same size.

    One size serves all rounds. The rise is therefore the mean over round kinds, weighted by their share of rollout seconds; a kind
    without a reference counts as unchanged. Noise is estimated from differences between successive steps, so that a steady rise is
    not counted as noise. The noise is at least that of independent events (Poisson).

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
    """Compares rollout seconds after a change with the seconds that the same tokens would have taken before the change.

    Each round kind is compared with itself, so that another mix of kinds is no change of speed. Noise is estimated from the scatter
    of the steps before the change.

    Returns:
        None if no round kind occurs both before and after the change.
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
    """Returns the number of steps since the last step with preemptions or with an unknown number of preemptions."""
    return next((i for i, step in enumerate(reversed(history)) if step.preemptions != 0), len(history))


class PlannedRun:
    """Passes the steps of a run to a planner and saves them.

    Args:
        bounds: the possible sizes.
        max_changes: see :class:`TpPlanner`.
        folder: folder of the checkpoints; None: nothing is saved.
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
        """Takes in a step and saves it. The first call also shows the planner the steps before it that earlier launches saved.

        Args:
            number: number of the step or rollout.
            metrics: other metrics of the step; with tail batching, they hold the round kind and the number of generated tokens.
            tp: size at which the step ran.
            preemptions: number of preemptions of all servers; None: unknown.
            seconds, tokens: duration and number of tokens of the rollout; 0: unknown, and nothing is decided.

        Returns:
            The requested change of size, or None, and the metrics for the log by name.
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
        """Shows the planner the saved steps before ``first`` whose size is still possible; returns these steps."""
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
