"""Adds the metrics ``rl_accel/...`` to the metrics that a verl trainer logs each step, while any feature is on."""

from collections.abc import Mapping
from typing import Any

from rl_accel.patches.patch import Patch
from rl_accel.runtime import CHECKS, RUNTIME
from rl_accel.telemetry import metrics

_STEP = "training/global_step"
"""Metric that verl logs for each training step, but not for a validation before the first one."""
_UNSEEN = ("final_output", "stall")
"""Features that write no metric."""


def _with_ours(original: Any, _settings: Any) -> Any:
    def log(self: Any, data: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
        # verl puts actor/ before the metrics of an actor update, ours included.
        named = {key.removeprefix("actor/") if key.startswith("actor/rl_accel/") else key: data[key] for key in data}
        logged = {**named, **metrics.drain(), **metrics.run_observers(step, data)}
        if _STEP in data:
            logged |= _applied(logged)
        return original(self, logged, step, *args, **kwargs)

    return log


def _applied(logged: Mapping[str, Any]) -> dict[str, float]:
    """Returns ``rl_accel/<feature>/applied`` for each feature that is on: 1 if the feature had an effect in this step, else 0.

    ``logged`` holds the metrics of the step. A feature that had an effect has written a metric of its own.
    """
    ruled_out = (RUNTIME.sources() or {}).get(CHECKS, {})
    applied = {}
    for feature in RUNTIME.status().features:
        if feature.name not in _UNSEEN and (feature.requested != "off" or feature.name in ruled_out):
            own = [name for name in logged if name.startswith(f"rl_accel/{feature.name}/")]
            applied[f"rl_accel/{feature.name}/applied"] = float(any(not name.endswith("/stock_calls") for name in own))
    return applied


SWITCHES = (
    Patch(
        name="verl.metrics.trainer",
        target="verl.utils.tracking:Tracking.log",
        supports="verl>=0.6",
        params=("self", "data", "step", "backend"),
        make=_with_ours,
        no_seam="the V1 trainer takes metrics only from a subclass of it or a custom sampler, the legacy one from nobody",
        remove_when="a trainer takes metrics from plug-ins",
    ),
)
