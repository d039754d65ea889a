"""The planner of one run, with the file that carries what it knows to the next launch: what verl's and slime's adapters share."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_accel.files import write_atomically
from rl_accel.parallel.tp_planner import Decision, Observation, RoundKind, TpPlanner
from rl_accel.rollout.driver import METRICS_PREFIX as TAIL_BATCHING

logger = logging.getLogger("rl_accel")

STATE_FILE = "rl_accel_tp_replan.json"
"""Beside the checkpoints: what the planner knows after each step."""


class PlannedRun:
    """Shows a planner the steps of a run.

    Args:
        planner: new.
        folder: of the checkpoints; None: nothing is kept.
        resumed: whether the run goes on with an earlier launch, whose file is then read.
    """

    def __init__(self, planner: TpPlanner, folder: str | None, resumed: bool) -> None:
        self._planner = planner
        self._file = Path(folder) / STATE_FILE if folder else None
        if planner.bounds.note:
            logger.info("rl-accel: tp_replan: %s", planner.bounds.note)
        if resumed and self._file is not None and self._file.is_file():
            try:
                planner.load_state_dict(json.loads(self._file.read_text())["planner"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                logger.warning("rl-accel: tp_replan begins anew, %s cannot be used: %s", self._file, error)

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
        """Take in a step, and keep what is known.

        Args:
            number: of the step or rollout.
            metrics: its other numbers; with tail batching they tell the kind of its round and all the tokens generated.
            tp: the size that it ran at.
            preemptions: of all servers; None: unknown.
            seconds, tokens: of its rollout; 0: unknown, and nothing is decided.

        Returns:
            The decision, if it is a change, and the numbers for the log by name.
        """
        tokens = float(metrics.get(TAIL_BATCHING + "tokens_generated") or tokens)
        wanted, change = tp, None
        if seconds > 0 and tokens >= 1:
            seen = Observation(
                _kind_of(metrics), tp=tp, preemptions=preemptions, rollout_seconds=float(seconds), tokens=round(tokens)
            )
            decision = self._planner.step(seen)
            wanted, change = decision.tp, decision if decision.change != "keep" else None
            logger.debug("rl-accel: tp_replan: after %d: %s", number, decision)
            self._save(number)
        numbers = {"tp": float(tp), "wanted_tp": float(wanted), "changes": float(self._planner.changes)}
        return change, numbers if preemptions is None else {**numbers, "preemptions": float(preemptions)}

    def _save(self, number: int) -> None:
        if self._file is None:
            return
        try:
            write_atomically(self._file, json.dumps({"step": number, "planner": self._planner.state_dict()}))
        except OSError as error:
            logger.warning("rl-accel: tp_replan: %s could not be written: %s", self._file, error)


def _kind_of(metrics: Mapping[str, Any]) -> RoundKind:
    if metrics.get(TAIL_BATCHING + "short_round"):
        return "short"
    return "long" if metrics.get(TAIL_BATCHING + "long_round") else "all"
