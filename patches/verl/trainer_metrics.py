"""Adds ``rl_accel/...`` numbers to what the V1 trainer logs each step: what is applied, kernels used, seconds saved."""

import functools
from typing import Any

from rl_accel.patches.patch import Patch


def _with_ours(original: Any, _settings: Any) -> Any:
    @functools.wraps(original)
    def compute_metrics(self: Any, batch: Any, metrics: Any, timing_raw: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, batch, metrics, timing_raw, *args, **kwargs)
        metrics.update(_collect())
        return result

    return compute_metrics


def _collect() -> dict[str, float]:
    from rl_accel.runtime import RUNTIME
    from rl_accel.telemetry import metrics

    applied = {
        f"rl_accel/{feature.name}/applied": float(feature.applied)
        for feature in RUNTIME.status().features
        if feature.requested != "off"
    }
    return {**applied, **metrics.drain()}


PATCHES = (
    Patch(
        name="verl.metrics.trainer",
        feature="metrics",
        target="verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_metrics",
        supports="verl>=0.9",
        params=("self", "batch", "metrics", "timing_raw", "global_steps", "epoch"),
        make=_with_ours,
        no_seam="on_step_end and sample() can add metrics only from a trainer subclass or a custom sampler",
    ),
)
