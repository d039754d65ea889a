"""Log function for slime that adds the metrics of all enabled features. slime accepts only one log function for rollouts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_accel.integrations.slime.hooks import flags_of
from rl_accel.integrations.slime.interfaces import LoggingUtils, MetricUtils, RolloutMetrics
from rl_accel.integrations.slime.launch_line import LOG_FUNCTION, enabled_features, function_at

LOG_INTERFACES = (RolloutMetrics, LoggingUtils, MetricUtils)
"""Protocols of the parts of slime that call :func:`log`, or that it calls. They are compared with the installed slime."""


@dataclass(frozen=True)
class LoggedRollout:
    """Data about one rollout that slime passes to the log function."""

    number: int  # slime's rollout_id
    args: Any  # slime's arguments
    metrics: Mapping[str, Any]  # as the rollout function has returned them


def log(rollout_id: int, args: Any, samples: Any, rollout_extra_metrics: Any, rollout_time: float) -> bool:
    """Adds the metrics of the enabled features to the metrics that slime logs for a rollout.

    slime calls this function through ``--custom-rollout-log-function-path``. Returns True if slime should skip its own log, because
    the user's log function says so.
    """
    extra = rollout_extra_metrics if isinstance(rollout_extra_metrics, dict) else None
    rollout = LoggedRollout(rollout_id, args, extra or {})
    numbers: dict[str, float] = {}
    for *_, hooks in enabled_features(flags_of(args)):
        if hooks.metrics:
            numbers |= function_at(hooks.metrics)(rollout)
    if extra is not None:
        extra.update(numbers)
    elif numbers:  # the rollout function returned no metrics
        _log_alone(args, rollout_id, numbers)
    path = getattr(args, "rl_accel_kept", {}).get(LOG_FUNCTION)
    return bool(path and function_at(path)(rollout_id, args, samples, rollout_extra_metrics, rollout_time))


def _log_alone(args: Any, rollout_id: int, numbers: dict[str, float]) -> None:
    from slime.observability import logging_utils, metric_utils

    logs: LoggingUtils = logging_utils
    steps: MetricUtils = metric_utils
    step = steps.compute_rollout_step(args, rollout_id)
    logs.log(args, {**numbers, "rollout/step": step}, step_key="rollout/step")
