"""slime has room for one function that logs a rollout, so there is one: every feature that is on adds its numbers."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_accel.integrations.slime.flags import flags_of

LOG, LOG_EVALUATION = f"{__name__}.log", f"{__name__}.log_evaluation"
_FEATURES = {
    "reward_timeout": "rl_accel.integrations.slime.reward_timeout.metrics",
    "tp_replan": "rl_accel.integrations.slime.tp_replan.replan",
}
"""Modules with ``numbers_of(rollout)``, by feature."""


@dataclass(frozen=True)
class Rollout:
    """What slime says of a rollout when it is about to log it.

    Attributes:
        number: slime's ``rollout_id``.
        args: slime's.
        samples: of the batch.
        metrics: of the rollout function; empty if it returns none.
        seconds: from its first request until the batch was complete, judges included.
    """

    number: int
    args: Any
    samples: Sequence[Any]
    metrics: Mapping[str, Any]
    seconds: float


def log(rollout_id: int, args: Any, samples: Any, rollout_extra_metrics: Any, rollout_time: float) -> bool:
    """slime's ``--custom-rollout-log-function-path``: adds our numbers to those that slime is about to log, and has it go on.

    Raises:
        ConfigError: a flag is wrong.
    """
    flags = flags_of(args)
    extra = rollout_extra_metrics if isinstance(rollout_extra_metrics, dict) else None
    rollout = Rollout(rollout_id, args, samples, extra or {}, rollout_time)
    numbers: dict[str, float] = {}
    for feature, module in _FEATURES.items():
        if getattr(flags, feature).enable:
            numbers |= importlib.import_module(module).numbers_of(rollout)
    if extra is not None:
        extra.update(numbers)
    elif numbers:  # a rollout function that returns no metrics
        _log_alone(args, rollout_id, numbers)
    return False


def log_evaluation(rollout_id: int, args: Any, data: Any, extra_metrics: Any) -> bool:
    """slime's ``--custom-eval-rollout-log-function-path``: what servers count in an evaluation is not of the next rollout.

    Raises:
        ConfigError: a flag is wrong.
    """
    if flags_of(args).tp_replan.enable:
        from rl_accel.integrations.slime.tp_replan import replan

        replan.set_aside(args)
    return False


def _log_alone(args: Any, rollout_id: int, numbers: dict[str, float]) -> None:
    from slime.observability import logging_utils
    from slime.observability.metric_utils import compute_rollout_step

    step = compute_rollout_step(args, rollout_id)
    logging_utils.log(args, {**numbers, "rollout/step": step}, step_key="rollout/step")
