"""Puts the observer where the trainer's logger is, while the feature is on."""

from typing import Any

from rl_accel.patches.registration import Registration
from rl_accel.telemetry import metrics


def _register(_settings: Any) -> None:
    from rl_accel.integrations.verl.telemetry.observer import Observer

    metrics.observe("telemetry", Observer())


SWITCHES = (
    Registration(
        name="verl.telemetry.observer",
        feature="telemetry",
        target="verl.utils.tracking:Tracking",
        register=_register,
        unregister=lambda: metrics.observe("telemetry", None),
        owner="rl_accel.integrations.verl.telemetry.observer",
        find=lambda: metrics.observer("telemetry"),
    ),
)
