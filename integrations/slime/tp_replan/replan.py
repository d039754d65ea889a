"""Shows the planner each rollout, and gives its numbers to slime's log."""

import logging
from pathlib import Path
from typing import Any

from rl_accel.features.tp_replan import TP_REPLAN, TpReplanFlags
from rl_accel.integrations.slime.hooks import flags_of
from rl_accel.integrations.slime.rollout_log import Rollout
from rl_accel.integrations.slime.tp_replan import STATE_FILE, arguments
from rl_accel.integrations.slime.tp_replan.advice import advise
from rl_accel.integrations.slime.tp_replan.layout import layout_of
from rl_accel.integrations.slime.tp_replan.servers import reader
from rl_accel.parallel import tp_state_file
from rl_accel.parallel.tp_decisions import Observation
from rl_accel.parallel.tp_planner import TpPlanner
from rl_accel.parallel.tp_rounds import kind_of, tokens_generated
from rl_accel.telemetry.server_counters import Counters

logger = logging.getLogger("rl_accel")

PREFIX = "rl_accel/tp_replan/"


class TpReplan:
    """The planner of a run, in the process that makes its rollouts.

    Args:
        args: slime's.
        flags: of this feature.

    Raises:
        ConfigError: see :func:`~rl_accel.integrations.slime.tp_replan.arguments.check`.
    """

    def __init__(self, args: Any, flags: TpReplanFlags) -> None:
        arguments.check_flags(flags)
        self.args = args
        self._flags = flags
        self._layout = layout_of(args)
        self._planner = TpPlanner(arguments.bounds_of(args, flags, self._layout))
        self._file = Path(args.save) / STATE_FILE if args.save else None
        self._begun = False
        self._counters = Counters(reader(args))
        if self._planner.bounds.note:
            logger.info("rl-accel: tp_replan: %s", self._planner.bounds.note)

    def set_aside(self) -> None:
        """Leave out of the next rollout what servers have counted so far."""
        self._counters.take()

    def numbers_of(self, rollout: Rollout) -> dict[str, float]:
        """Return ``tp`` and ``wanted_tp``; ``preemptions`` if they are known."""
        preemptions, _ = self._counters.take()
        if not self._begun:
            self._begun = True
            if rollout.number > 0 and self._file is not None:  # a launch that goes on with a run
                tp_state_file.load(self._file, self._planner)
        tp = self._layout.tp
        numbers = {"tp": float(tp), "wanted_tp": float(tp)}
        if preemptions is not None:
            numbers["preemptions"] = float(preemptions)
        tokens = tokens_generated(rollout.metrics) or sum(sample.response_length for sample in rollout.samples)
        if rollout.seconds > 0 and tokens >= 1:
            seen = Observation(
                kind_of(rollout.metrics),
                tp=tp,
                preemptions=preemptions,
                rollout_seconds=float(rollout.seconds),
                tokens=round(tokens),
            )
            numbers["wanted_tp"] = float(self._decide(seen, rollout.number))
        return {PREFIX + name: value for name, value in numbers.items()}

    def _decide(self, seen: Observation, rollout: int) -> int:
        decision = self._planner.step(seen)
        if decision.change == "keep":
            logger.debug("rl-accel: tp_replan: rollout %d: %s", rollout, decision.reason)
        else:
            advise(self.args, self._flags.config_file, self._layout, rollout, decision)
        if self._file is not None:
            tp_state_file.save(self._file, self._planner, rollout)
        return decision.tp


_running: TpReplan | None = None
"""A process makes rollouts for one run."""


def _of(args: Any) -> TpReplan:
    global _running
    if _running is None or _running.args is not args:
        _running = TpReplan(args, flags_of(args)[TP_REPLAN])
    return _running


def numbers_of(rollout: Rollout) -> dict[str, float]:
    """Take in a rollout; what :meth:`TpReplan.numbers_of` returns, under ``rl_accel/tp_replan/``.

    Raises:
        ConfigError: see :func:`~rl_accel.integrations.slime.tp_replan.arguments.check`.
    """
    return _of(rollout.args).numbers_of(rollout) if arguments.generates(rollout.args) else {}


def set_aside(args: Any) -> None:
    """Leave out of the next rollout what servers have counted so far: it was an evaluation.

    Raises:
        ConfigError: see :func:`~rl_accel.integrations.slime.tp_replan.arguments.check`.
    """
    if arguments.generates(args):
        _of(args).set_aside()
