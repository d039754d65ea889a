"""Has the trainer's log shown to the callback: in the trainer process, once verl's tracking is imported."""

from typing import Any

from rl_accel.patches.registration import Registration
from rl_accel.telemetry import metrics

_FEATURE = "tp_replan"


def _register(settings: Any) -> None:
    from rl_accel.integrations.verl.tp_replan.callback import TpReplan

    metrics.observe(_FEATURE, TpReplan(settings))


SWITCHES = (
    Registration(
        name="verl.trainer_log.tp_replan",
        feature=_FEATURE,
        target="verl.utils.tracking:each logged step",
        register=_register,
        unregister=lambda: metrics.observe(_FEATURE, None),
        owner="rl_accel.integrations.verl.tp_replan.callback",
        find=lambda: metrics.observer(_FEATURE),
    ),
)
