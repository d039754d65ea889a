"""Adds the metrics ``rl_accel/...`` to the metrics that a verl trainer logs each step, while any feature is on."""

from typing import Any

from rl_accel.patches.patch import Patch
from rl_accel.runtime import RUNTIME
from rl_accel.telemetry import metrics


def _with_ours(original: Any, _settings: Any) -> Any:
    def log(self: Any, data: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
        # verl puts actor/ before the metrics of an actor update, ours included.
        named = {key.removeprefix("actor/") if key.startswith("actor/rl_accel/") else key: data[key] for key in data}
        applied = {
            f"rl_accel/{feature.name}/applied": float(feature.applied)
            for feature in RUNTIME.status().features
            if feature.requested != "off"
        }
        ours = {**applied, **metrics.drain(), **metrics.run_observers(step, data)}
        return original(self, {**named, **ours}, step, *args, **kwargs)

    return log


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
