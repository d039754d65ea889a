"""The stage clock: where a step's time goes. It changes nothing, but speeds nothing up and leaves a file: never automatic."""

from dataclasses import dataclass

from rl_accel.feature import ENABLE, Feature, flag


@dataclass
class TelemetryFlags:
    """Flags of ``rl_accel.telemetry``."""

    enable: bool | None = flag(None, ENABLE)


TELEMETRY = Feature(
    name="telemetry",
    summary="where a step's time goes: stages, idle share of generation, completion times, preemptions",
    flags=TelemetryFlags,
    lossless=True,
    switches={"verl": ("rl_accel.integrations.verl.telemetry",)},
    verl="rl_accel.integrations.verl.telemetry",
)
