"""slime has room for one function that logs a rollout, so there is one: every feature that is on adds its numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_accel.integrations.slime.hooks import flags_of
from rl_accel.integrations.slime.interfaces import LoggingUtils, MetricUtils, RolloutMetrics, Sample
from rl_accel.integrations.slime.launch_line import LOG_FUNCTIONS, function_at, hooks_of_features_that_are_on

LOG_INTERFACES = (RolloutMetrics, LoggingUtils, MetricUtils)
"""What :func:`log` needs of slime."""


@dataclass(frozen=True)
class Rollout:
    """What slime says of a rollout when it is about to log it.

    Attributes:
        number: slime's ``rollout_id``.
        args: slime's.
        samples: of the batch.
        metrics: of the rollout function; empty if it returns none.
        seconds: from its first request until the batch was complete, rewards included.
    """

    number: int
    args: Any
    samples: Sequence[Sample]
    metrics: Mapping[str, Any]
    seconds: float


def log(rollout_id: int, args: Any, samples: Any, rollout_extra_metrics: Any, rollout_time: float) -> bool:
    """slime's ``--custom-rollout-log-function-path``: adds our numbers to those that slime is about to log.

    Raises:
        ConfigError: a flag is wrong.
    """
    extra = rollout_extra_metrics if isinstance(rollout_extra_metrics, dict) else None
    rollout = Rollout(rollout_id, args, samples, extra or {}, rollout_time)
    numbers: dict[str, float] = {}
    for *_, hooks in hooks_of_features_that_are_on(flags_of(args)):
        if hooks.metrics:
            numbers |= function_at(hooks.metrics)(rollout)
    if extra is not None:
        extra.update(numbers)
    elif numbers:  # a rollout function that returns no metrics
        _log_alone(args, rollout_id, numbers)
    return _theirs(args, LOG_FUNCTIONS[0], rollout_id, args, samples, rollout_extra_metrics, rollout_time)


def log_evaluation(rollout_id: int, args: Any, data: Any, extra_metrics: Any) -> bool:
    """slime's ``--custom-eval-rollout-log-function-path``: tells features that what was generated last was an evaluation.

    Raises:
        ConfigError: a flag is wrong.
    """
    for *_, hooks in hooks_of_features_that_are_on(flags_of(args)):
        if hooks.after_evaluation:
            function_at(hooks.after_evaluation)(args)
    return _theirs(args, LOG_FUNCTIONS[1], rollout_id, args, data, extra_metrics)


def _theirs(args: Any, key: str, *given: Any) -> bool:
    """Call the function that the launch line names, if it does. Returns whether slime is to leave out its own log."""
    path = getattr(args, "rl_accel_kept", {}).get(key)
    return bool(path and function_at(path)(*given))


def _log_alone(args: Any, rollout_id: int, numbers: dict[str, float]) -> None:
    from slime.observability import logging_utils, metric_utils

    logs: LoggingUtils = logging_utils
    steps: MetricUtils = metric_utils
    step = steps.compute_rollout_step(args, rollout_id)
    logs.log(args, {**numbers, "rollout/step": step}, step_key="rollout/step")
