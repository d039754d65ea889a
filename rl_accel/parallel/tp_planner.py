"""Automatic changes of the tensor-parallel size (TP) of the rollout engine, after RollPacker (NSDI'26, section 4).

:class:`TpPlanner` decides about changes and checks that each change paid off; it uses no clock and no files. :class:`PlannedRun`
passes the training steps of this launch and of earlier launches of the run to the planner.
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

from rl_accel.files import BAD_RECORD, write_atomically
from rl_accel.parallel.model_memory import TpBounds
from rl_accel.rollout.round_driver import METRICS_PREFIX as TAIL_BATCHING

logger = logging.getLogger("rl_accel")

STATE_FILE = "rl_accel_tp_replan.json"
"""Name of the file with the measurements of past training steps, in the folder of the checkpoints."""

StepKind = Literal["short", "long", "all"]
"""Kind of a training step, by its rollout. Only steps of the same kind are compared.

short: a round of tail batching that cuts off slow prompts.
long: a round of tail batching that waits for prompts cut off earlier.
all: a step without tail batching, or a final round of tail batching."""
Change = Literal["raise", "lower", "roll back"]

RAISE_ABOVE = 1.05
"""Ratio of preemptions in the latest steps to those in earlier steps above which the TP size doubles (from RollPacker)."""
CALM_STEPS = 4
"""Number of training steps in a row without a preemption after which the TP size halves (value from RollPacker)."""
REFERENCE_STEPS = (6, 15)
"""Minimum and maximum number of earlier steps with which the latest steps are compared. Fewer are too noisy; more are outdated."""
CONFIRM_STEPS = 2
"""Number of latest steps that must all have more preemptions than earlier steps. A single one may be chance."""
FEW_PREEMPTIONS = 10
"""Smaller numbers of preemptions in a step count as this number, so that a rise from 1 to 5 preemptions counts as no rise."""
NOISE = 3.25
"""Number of standard deviations that a rise of preemptions must exceed. If preemptions vary by 20% at random, about one step in
2,000 is still taken for a rise."""
CHECK_STEPS = (5, 20)
"""Number of steps at a new TP size before the planner decides whether to keep it: 5 of each kind (:data:`StepKind`) that occurred
before the change, or 20 in all. The first step at the new size does not count. Chosen by hand."""
SLOWER = 0.03
"""Relative rise of rollout seconds per token above which a change is rolled back. A good change gains 1 to 4% (RollPacker)."""
SURE = 2.0
"""Number of standard errors that a rise of rollout seconds per token must exceed before a change is rolled back (95% interval)."""
RETRY_STEPS = 25
"""Number of steps for which a change of the TP size is blocked after it was rolled back or not carried out. Doubles each time.
After a successful increase, the decrease is blocked in the same way, so that the size does not swing. Chosen by hand."""
WINDOW = 80
"""Number of latest training steps that the planner remembers. With tail batching, about 16 of them are long rounds, enough for a
comparison by :data:`REFERENCE_STEPS`."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Measurements of one training step.

    Args:
        kind: see :data:`StepKind`.
        tp: TP size at which the step ran.
        preemptions: number of sequences that the rollout servers evicted from their key-value caches; None: unknown.
        rollout_seconds: seconds from the first launch of a request until the batch was complete; above 0.
        tokens: number of tokens generated in this time, including those of cancelled responses; above 0.
    """

    kind: StepKind
    tp: int
    preemptions: int | None
    rollout_seconds: float
    tokens: int


@dataclass(frozen=True)
class TPDecision:
    """A change of the TP size that the planner requests.

    Attributes:
        tp: TP size for the next step.
        change: "raise", "lower", or "roll back", which returns to the TP size before the last change.
        reason: line for the log with the sizes, the reason and the expected effect.
    """

    tp: int
    change: Change
    reason: str


class TpPlanner:
    """Decides after each training step whether the TP size of the rollout engine should change.

    The TP size doubles when preemptions rise (:func:`find_rise`) and halves after steps without preemptions. A change that makes
    rollouts slower (:func:`compare_speed`) is rolled back. Until a change is checked, no other change is requested.
    ``docs/tp-replan.md`` has the whole rule.

    Args:
        bounds: the possible TP sizes.
        max_changes: maximum number of changes in a run, including rollbacks. Each change leaves one for its rollback, so that below
            2 nothing ever changes.
    """

    def __init__(self, bounds: TpBounds, max_changes: int = 6) -> None:
        self.bounds = bounds
        self._max_changes = max_changes
        self._steps = self._tp = 0
        self.changes = 0  # number of changes carried out so far
        self._asked: TPDecision | None = None  # the change that was requested after the latest step
        self._history: list[Observation] = []
        self._before: list[Observation] = []  # steps before the last change; empty after its check
        self._holds: dict[tuple[int, int], tuple[int, int]] = {}  # (from, to): blocked until step, times

    def step(self, seen: Observation) -> TPDecision | None:
        """Takes in the measurements ``seen`` of a training step. Returns the change for the next step; None: keep the TP size.

        Raises:
            ValueError: the step ran at an impossible TP size.
        """
        if seen.tp not in self.bounds.sizes:
            raise ValueError(f"tp must be a possible size, found {seen.tp}: {self.bounds.obstacles_of(seen.tp)}")
        self._steps += 1
        self._match_request(seen.tp)
        self._history = [*self._history, seen][-WINDOW:]
        if self._before:
            return self._check()
        return None if seen.preemptions is None else self._plan()

    def _match_request(self, tp: int) -> None:
        """Compares the TP size ``tp`` of the latest step with the change that was requested before it.

        If the change was not carried out, blocks it for some steps. If the size has changed, starts a new history of steps.
        """
        asked, self._asked = self._asked, None
        if tp == self._tp:
            if asked is not None:
                self._hold(tp, asked.tp)
            return
        was, before = self._tp, self._history
        self._tp, self._history, self._before = tp, [], []
        if asked is None or asked.tp != tp:
            return
        self.changes += 1
        if asked.change == "roll back":
            self._hold(tp, was)
        else:
            self._before = before[-CHECK_STEPS[1] :]

    def _plan(self) -> TPDecision | None:
        rise = find_rise(self._history)
        calm = next((n for n, step in enumerate(reversed(self._history)) if step.preemptions != 0), len(self._history))
        counted = [step for step in self._history if step.preemptions is not None]
        change: Change
        if rise is not None and rise.value > RAISE_ABOVE:
            if rise.is_noise:
                return None
            target, change, reason = 2 * self._tp, "raise", f"preemptions are {rise}, more than {RAISE_ABOVE:g}"
        elif calm < CALM_STEPS or self._tp % 2 or any(steps[-1].preemptions for steps in _by_kind(counted).values()):
            return None
        else:
            target, change, reason = self._tp // 2, "lower", f"{calm} steps in a row without a preemption"
        if target not in self.bounds.sizes or self.changes + 2 > self._max_changes:  # a rollback needs one more
            return None
        return self._ask(target, change, reason, "unknown until tried; the published gain is 1 to 4% of a step")

    def _check(self) -> TPDecision | None:
        """Decides whether to roll back the last change of the TP size, to keep this change, or to wait for more steps."""
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

    def _ask(self, target: int, change: Change, reason: str, expected: str) -> TPDecision | None:
        until, _ = self._holds.get((self._tp, target), (0, 0))
        if self._steps < until:
            return None
        text = f"{change} TP {self._tp} to {target}: {reason}; expected: {expected}"
        self._asked = TPDecision(target, change, text)
        return self._asked

    def _hold(self, source: int, target: int) -> None:
        """Blocks the change from the TP size ``source`` to ``target`` for some steps."""
        _, times = self._holds.get((source, target), (0, 0))
        self._holds[source, target] = self._steps + RETRY_STEPS * 2 ** min(times, 20), times + 1


@dataclass(frozen=True)
class Ratio:
    """Ratio of a measurement in the latest steps to the same measurement in earlier steps.

    Attributes:
        value: the ratio; 1 means unchanged.
        noise: deviation of the ratio from 1 that noise alone may cause.
        text: the numbers from which the ratio was computed, for the log.
    """

    value: float
    noise: float
    text: str

    @property
    def is_noise(self) -> bool:
        """True if noise alone may explain that the ratio is above 1."""
        return self.value - 1 <= self.noise

    def __str__(self) -> str:
        return f"{self.value:.3f} times what they were ({self.text}, noise ±{self.noise:.3f})"


def find_rise(history: Sequence[Observation]) -> Ratio | None:
    """Compares preemptions of the latest steps with those of earlier steps at the same TP size.

    For each kind of step (:data:`StepKind`), divides the smaller number of preemptions in the latest two steps by the mean of
    earlier steps. Returns the mean ratio over all kinds, weighted by their rollout seconds. A kind with too few earlier steps
    counts as unchanged. Returns None if all kinds have too few.
    """
    rise, variance, words = 0.0, 0.0, []
    for kind, steps in _by_kind(history).items():
        counts = [step.preemptions for step in steps if step.preemptions is not None]
        reference, latest = counts[:-CONFIRM_STEPS][-REFERENCE_STEPS[1] :], counts[-CONFIRM_STEPS:]
        if len(reference) < REFERENCE_STEPS[0]:
            continue
        mean = fmean(reference)
        base = max(mean, FEW_PREEMPTIONS)
        # from successive steps, so that a steady rise does not count as noise
        scatter = fmean((b - a) ** 2 / 2 for a, b in pairwise(reference))
        share = sum(step.rollout_seconds for step in steps) / sum(step.rollout_seconds for step in history)
        rise += share * (max(min(latest), FEW_PREEMPTIONS) / base - 1)
        # at least the noise of independent events (Poisson), whose variance is their mean
        variance += (share / base) ** 2 * max(scatter, mean, 1.0) * (1 + 1 / len(reference))
        words.append(f"{kind} {min(latest)} over {mean:.4g}")
    return Ratio(1 + rise, NOISE * math.sqrt(variance), ", ".join(words)) if words else None


def compare_speed(before: Sequence[Observation], after: Sequence[Observation]) -> Ratio | None:
    """Returns the rollout seconds after a change of the TP size, divided by the seconds of as many tokens before the change.

    Compares steps of the same kind (:data:`StepKind`). Returns None if no kind occurs both before and after the change.
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


class PlannedRun:
    """Passes the measurements of each training step to a :class:`TpPlanner`, and saves them for later launches of the run.

    Args:
        bounds, max_changes: arguments of :class:`TpPlanner`.
        folder: folder of the checkpoints, where the measurements are saved; None: they are not saved.
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
    ) -> tuple[TPDecision | None, dict[str, float]]:
        """Passes a training step to the planner and saves its measurements.

        The first call also passes the steps that earlier launches of the run have saved.

        Args:
            number: number of the training step or rollout.
            metrics: metrics of the step. Those of tail batching, if any, tell the kind of the step and replace ``tokens``.
            tp, preemptions: as in :class:`Observation`.
            seconds, tokens: duration of the rollout and number of its tokens. If one is 0 (unknown), the step is ignored.

        Returns:
            Two values: the requested change of the TP size (or None), and the metrics for the log.
        """
        if self._seen is None:
            self._seen = self._replay(number)
        tokens = float(metrics.get(TAIL_BATCHING + "tokens_generated") or tokens)
        change = None
        if seconds > 0 and tokens >= 1:
            rounds: tuple[StepKind, ...] = ("short", "long")
            seen = Observation(
                kind=next((kind for kind in rounds if metrics.get(f"{TAIL_BATCHING}{kind}_round")), "all"),
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
        """Passes the saved steps before step ``first`` to the planner and returns them.

        Leaves out steps at impossible TP sizes, and later steps, which this launch of the run repeats.
        """
        if self._file is None or not self._file.is_file():
            return []
        try:
            steps = json.loads(self._file.read_text())["steps"]
            kept = [step for step in steps if step["step"] < first and step["tp"] in self._planner.bounds.sizes]
            earlier = [Observation(**{name: step[name] for name in step if name != "step"}) for step in kept]
        except (OSError, *BAD_RECORD) as error:
            logger.warning("rl-accel: tp_replan begins anew, %s cannot be used: %r", self._file, error)
            return []
        for seen in earlier:
            self._planner.step(seen)
        return kept

    def _save(self) -> None:
        if self._file is None:
            return
        try:
            write_atomically(self._file, json.dumps({"steps": self._seen}))
        except OSError as error:
            logger.warning("rl-accel: tp_replan: %s could not be written: %s", self._file, error)
